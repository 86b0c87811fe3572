"""Append-only files of one kind of row: small write-ahead Arrow segments, compacted into Parquet parts.

::

    <folder>/segments/000000000065.arrow                 one append, on disk before it is acknowledged
    <folder>/parts/000000000001-000000000064.parquet     what segments 1 to 64 held, in their order

A part counts from the moment it is there, and the segments it covers no longer do, whether or not they are
deleted yet. So a crash anywhere in a compaction neither loses a row nor shows it twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from laminar.errors import LaminarError
from laminar.experience.store import Store

__all__ = ["SegmentFile", "Segments", "covered", "live"]

log = logging.getLogger(__name__)

_ROW_GROUP = 256
"""Rows in a Parquet row group: the least that is read to get at one old row."""


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """One file: the numbers of the appends in it, and whether it is a compacted part."""

    first: int
    last: int
    part: bool = False

    @property
    def name(self) -> str:
        """Path within the folder.

        >>> SegmentFile(65, 65).name, SegmentFile(1, 64, part=True).name
        ('segments/000000000065.arrow', 'parts/000000000001-000000000064.parquet')
        """
        if self.part:
            return f"parts/{self.first:012d}-{self.last:012d}.parquet"
        return f"segments/{self.first:012d}.arrow"

    @staticmethod
    def parse(name: str) -> SegmentFile | None:
        """The inverse of ``name``; None for any other file.

        >>> SegmentFile.parse("segments/000000000065.arrow")
        SegmentFile(first=65, last=65, part=False)
        >>> SegmentFile.parse("segments/notes.txt")
        """
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        numbers = stem.split("-")
        if not all(number.isdigit() for number in numbers):
            return None
        match folder, suffix, numbers:
            case "segments", "arrow", [number]:
                return SegmentFile(int(number), int(number))
            case "parts", "parquet", [first, last]:
                return SegmentFile(int(first), int(last), part=True)
        return None


def live(files: Sequence[SegmentFile]) -> list[SegmentFile]:
    """The files that together hold every row once, in order of append.

    >>> segments = [SegmentFile(1, 1), SegmentFile(2, 2), SegmentFile(3, 3)]
    >>> [file.name for file in live([*segments, SegmentFile(1, 2, part=True)])]
    ['parts/000000000001-000000000002.parquet', 'segments/000000000003.arrow']
    """
    return sorted(set(files) - set(covered(files)))


def covered(files: Sequence[SegmentFile]) -> list[SegmentFile]:
    """The segments whose rows are in a part already.

    >>> covered([SegmentFile(1, 2, part=True), SegmentFile(2, 2), SegmentFile(3, 3)])
    [SegmentFile(first=2, last=2, part=False)]
    """
    numbers = {number for file in files if file.part for number in range(file.first, file.last + 1)}
    return [file for file in files if not file.part and file.first in numbers]


class Segments:
    """The files of one folder, for their one writer; ``files`` and ``read`` are for anybody.

    Parameters
    ----------
    store, folder
        Where they are.
    schema
        Of every file.
    """

    def __init__(self, store: Store, folder: str, schema: pa.Schema) -> None:
        self.store, self.folder, self.schema = store, folder, schema
        self._next = 1
        self._loose: list[SegmentFile] = []

    def files(self) -> list[SegmentFile]:
        """The live files now. Segments are listed before parts: one that is compacted in between is found in
        its part, so that a reader beside a writer misses nothing."""
        return live(self._listed())

    def read(self, file: SegmentFile, columns: list[str] | None = None) -> pa.Table:
        """A file's rows.

        Raises
        ------
        FileNotFoundError
            It was compacted since ``files`` was called.
        pyarrow.ArrowInvalid
            It is torn.
        """
        data = self.store.read(f"{self.folder}/{file.name}")
        if file.part:
            return pq.read_table(pa.BufferReader(data), columns=columns).cast(self._schema(columns))
        with pa.ipc.open_file(data) as reader:
            table = reader.read_all()
        return table if columns is None else table.select(columns)

    def read_rows(self, file: SegmentFile, offsets: Sequence[int]) -> pa.Table:
        """Single rows of a file, by position."""
        if not file.part:
            return self.read(file).take(pa.array(offsets, pa.int64()))
        part = pq.ParquetFile(pa.BufferReader(self.store.read(f"{self.folder}/{file.name}")))
        groups = sorted({offset // _ROW_GROUP for offset in offsets})
        start = {group: place * _ROW_GROUP for place, group in enumerate(groups)}
        table = part.read_row_groups(groups).cast(self.schema)
        return table.take(pa.array([start[n // _ROW_GROUP] + n % _ROW_GROUP for n in offsets], pa.int64()))

    def recover(self, columns: list[str]) -> Iterator[tuple[SegmentFile, pa.Table]]:
        """Take the folder over from a writer that may have died anywhere; yields every live file's columns.

        A torn last segment was never acknowledged: it is set aside as ``….torn`` and the log says so.

        Raises
        ------
        LaminarError
            A file before the last is damaged: acknowledged rows are in it, so somebody has to decide.
        """
        for kind in ("segments", "parts"):
            self.store.sweep(f"{self.folder}/{kind}")
        listed = self._listed()
        files = live(listed)
        self._next = max((file.last for file in files), default=0) + 1
        for file in files:
            try:
                table = self.read(file, columns)
            except (pa.ArrowInvalid, OSError) as error:
                self._set_aside(file, error, is_last=file == files[-1])
                continue
            if not file.part:
                self._loose.append(file)
            yield file, table
        self.store.delete(f"{self.folder}/{file.name}" for file in covered(listed))

    def append(self, batch: pa.RecordBatch) -> SegmentFile:
        """Write a batch as the next segment; it is on disk when this returns.

        Raises
        ------
        LaminarError
            It could not be written; the next append takes the same number.
        """
        file = SegmentFile(self._next, self._next)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, self.schema) as writer:
            writer.write_batch(batch)
        self.store.write(f"{self.folder}/{file.name}", sink.getvalue())
        self._next += 1
        self._loose.append(file)
        return file

    @property
    def loose(self) -> int:
        """How many segments are in no part yet."""
        return len(self._loose)

    def compact(self, count: int) -> tuple[SegmentFile, pa.Table]:
        """Write the oldest ``count`` segments as one part. May run beside ``append``; then ``forget`` them.

        Returns
        -------
        The part and its rows.
        """
        files = self._loose[:count]
        table = pa.concat_tables(self.read(file) for file in files)
        part = SegmentFile(files[0].first, files[-1].last, part=True)
        sink = pa.BufferOutputStream()
        scalars = [field.name for field in self.schema if not pa.types.is_nested(field.type)]
        pq.write_table(
            table,
            sink,
            row_group_size=_ROW_GROUP,
            compression="zstd",
            compression_level=1,
            use_dictionary=scalars,  # tokens and logprobs repeat too little: 3 times as fast, and smaller
            write_statistics=scalars,
        )
        self.store.write(f"{self.folder}/{part.name}", sink.getvalue())
        return part, table

    def forget(self, count: int) -> None:
        """Delete the oldest ``count`` segments, once a part covers them and nobody reads them any more."""
        files = self._loose[:count]
        del self._loose[:count]
        self.store.delete(f"{self.folder}/{file.name}" for file in files)

    def _listed(self) -> list[SegmentFile]:
        names = [
            f"{kind}/{name}" for kind in ("segments", "parts") for name in self.store.names(f"{self.folder}/{kind}")
        ]
        return [file for file in map(SegmentFile.parse, names) if file is not None]

    def _schema(self, columns: list[str] | None) -> pa.Schema:
        return self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])

    def _set_aside(self, file: SegmentFile, error: Exception, *, is_last: bool) -> None:
        where = f"{self.store.url}/{self.folder}/{file.name}"
        if file.part or not is_last:
            raise LaminarError(f"{where} is damaged ({error}): restore it, or move it away to go on without its rows")
        log.warning("%s is torn (%s): it was never acknowledged and is set aside as .torn", where, error)
        self.store.rename(f"{self.folder}/{file.name}", f"{self.folder}/{file.name}.torn")
