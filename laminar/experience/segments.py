"""Append-only files of one kind of row: small write-ahead Arrow segments, compacted and merged into Parquet parts.

Names and which of them count: ``segment_files``. A part counts from the moment it is there, and the files it
covers no longer do, whether or not they are deleted yet. So a crash anywhere in a compaction neither loses a row
nor shows it twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from laminar.errors import LaminarError
from laminar.experience.segment_files import SegmentFile, covered, live, merge_due, unbroken
from laminar.experience.store import Store, StoreError

__all__ = ["Segments"]

log = logging.getLogger(__name__)

_ROW_GROUP_BYTES = 16 << 20
"""Bytes of rows in a Parquet row group: the least that is read to get at one old row."""
_FAN = 8
"""How many parts of about one size are merged into one."""
_PART_BYTES = 256 << 20
_KEPT_SECONDS = 10.0
"""How long a file stays that no longer counts: who listed it before may be about to read it."""
_LISTINGS = 5
"""How often a listing that lacks files is taken again; then they are really gone."""


class Segments:
    """The files of one folder, for their one writer; ``files`` and ``read`` are for anybody.

    Parameters
    ----------
    store, folder
        Where they are.
    schema
        Of every file.
    clock
        Seconds, monotonic: files that no longer count are kept for a while.

    Attributes
    ----------
    notes
        What was found wrong and repaired, one line each.
    """

    def __init__(
        self, store: Store, folder: str, schema: pa.Schema, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.store, self.folder, self.schema = store, folder, schema
        self.notes: list[str] = []
        self._epoch = ""
        self._check: Callable[[], None] = lambda: None
        self._next = 1
        self._failed = 0
        self._loose: list[SegmentFile] = []
        self._parts: list[tuple[SegmentFile, int]] = []
        self._passed: list[tuple[SegmentFile, float]] = []
        """Files that no longer count, and when they may be deleted."""
        self._scalars = [field.name for field in schema if not pa.types.is_nested(field.type)]

    def files(self) -> list[SegmentFile]:
        """The live files now. Segments are listed before parts: one that is compacted in between is found in
        its part, so that a reader beside a writer misses nothing."""
        before: list[SegmentFile] = []
        for _ in range(_LISTINGS):
            files = live(self._listed())
            if unbroken(files) or files == before:
                break
            before = files
        return files

    def path(self, file: SegmentFile) -> str:
        """What the store knows a file by."""
        return f"{self.folder}/{file.name}"

    def read(self, file: SegmentFile, columns: list[str] | None = None) -> pa.Table:
        """A file's rows.

        Raises
        ------
        FileNotFoundError
            It was compacted since ``files`` was called.
        pyarrow.ArrowInvalid
            It is torn.
        """
        data = self.store.read(self.path(file))
        if file.part:
            return pq.read_table(pa.BufferReader(data), columns=columns).cast(self._schema(columns))
        with pa.ipc.open_file(data) as reader:
            table = reader.read_all()
        return table if columns is None else table.select(columns)

    def read_rows(self, file: SegmentFile, offsets: Sequence[int]) -> pa.Table:
        """Single rows of a file, by position."""
        if not file.part:
            return self.read(file).take(pa.array(offsets, pa.int64()))
        part = pq.ParquetFile(pa.BufferReader(self.store.read(self.path(file))))
        tables, places, start, seen = [], dict.fromkeys(offsets, -1), 0, 0
        for number in range(part.num_row_groups):
            end = start + part.metadata.row_group(number).num_rows
            if mine := [offset for offset in places if start <= offset < end]:
                tables.append(part.read_row_group(number).cast(self.schema))
                places |= {offset: seen + offset - start for offset in mine}
                seen += end - start
            start = end
        return pa.concat_tables(tables).take(pa.array([places[offset] for offset in offsets], pa.int64()))

    def recover(
        self, columns: list[str], *, epoch: str = "", check: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[SegmentFile, pa.Table]]:
        """Take the folder over from a writer that may have died anywhere; yields every live file's columns.

        A torn last segment was never acknowledged: it is set aside as ``….torn``, and ``notes`` and the log say so.

        Parameters
        ----------
        epoch, check
            The owner's claim, and what raises once a later owner is there.

        Raises
        ------
        LaminarError
            A file before the last is damaged: acknowledged rows are in it, so somebody has to decide.
        """
        self._epoch, self._check = epoch, check
        for kind in ("segments", "parts"):
            self.store.sweep(f"{self.folder}/{kind}")
        files = self.files()
        self._next = max((file.last for file in files), default=0) + 1
        for file in files:
            try:
                table = self.read(file, columns)
            except (pa.ArrowInvalid, OSError) as error:
                self._set_aside(file, error, is_last=file == files[-1])
                continue
            if file.part:
                self._parts.append((file, self.store.size(self.path(file))))
            else:
                self._loose.append(file)
            yield file, table
        self.store.delete(self.path(file) for file in covered(self._listed()))

    def append(self, batch: pa.RecordBatch) -> SegmentFile:
        """Write a batch as the next segment; it is on disk when this returns.

        Raises
        ------
        StoreError
            It could not be written; the next append takes the same number. It counts instead of this one, also if
            the store takes that up after all: a remote one may do so long after it was given up on.
        LaminarError
            A later owner has taken the folder over. What was written is void.
        """
        self._check()
        file = SegmentFile(self._next, self._next, epoch=self._epoch + (f"-{self._failed:03d}" if self._failed else ""))
        self._failed += 1
        with self.store.writing(self.path(file)) as sink, pa.ipc.new_file(sink, self.schema) as writer:
            writer.write_batch(batch)
        self._check()
        self._failed = 0
        self._next += 1
        self._loose.append(file)
        return file

    @property
    def loose(self) -> int:
        """How many segments are in no part yet."""
        return len(self._loose)

    def compact(self, count: int) -> SegmentFile:
        """Write the oldest ``count`` segments as one part. May run beside ``append``; then ``forget`` them."""
        files = self._loose[:count]
        return self._write_part(files, (self.read(file) for file in files))

    def forget(self, count: int) -> None:
        """Let go of the oldest ``count`` segments, once a part covers them and their writer reads them no more."""
        self._check()
        files = self._loose[:count]
        del self._loose[:count]
        self._pass_over(files)

    def merge(self) -> SegmentFile | None:
        """Write the newest parts as one, if so many are of about one size; then ``forget_covered``. None if not."""
        count = merge_due([size for _, size in self._parts], fan=_FAN, cap=_PART_BYTES)
        if not count:
            return None
        files = [file for file, _ in self._parts[-count:]]
        return self._write_part(files, (table for file in files for table in self._row_groups(file)))

    def forget_covered(self, part: SegmentFile) -> None:
        """Let go of the parts whose rows are in this one."""
        self._check()
        inside = [file for file, _ in self._parts if part.first <= file.first and file.last <= part.last]
        gone = [file for file in inside if file != part]
        self._parts = [(file, size) for file, size in self._parts if file not in gone]
        self._pass_over(gone)

    def close(self) -> None:
        """Delete what no longer counts, however recent."""
        self.store.delete(self.path(file) for file, _ in self._passed)
        self._passed.clear()

    def _pass_over(self, files: Sequence[SegmentFile]) -> None:
        """These files no longer count; delete those of which that has been so for long enough."""
        now = self._clock()
        self._passed += [(file, now + _KEPT_SECONDS) for file in files]
        due = [file for file, until in self._passed if until <= now]
        self.store.delete(self.path(file) for file in due)
        del self._passed[: len(due)]

    def _write_part(self, files: Sequence[SegmentFile], tables: Iterator[pa.Table]) -> SegmentFile:
        """Write tables one after another, in row groups of a bounded size."""
        part = SegmentFile(files[0].first, files[-1].last, part=True)
        waiting: list[pa.Table] = []
        size = 0
        with self._part_writer(part) as writer:
            for table in tables:
                waiting.append(table)
                size += table.nbytes
                if size >= _ROW_GROUP_BYTES:
                    _write_rows(writer, waiting, size)
                    waiting, size = [], 0
            if waiting:
                _write_rows(writer, waiting, size)
        self._parts.append((part, self.store.size(self.path(part))))
        return part

    @contextmanager
    def _part_writer(self, part: SegmentFile) -> Iterator[Any]:
        with self.store.writing(self.path(part)) as sink:
            with pq.ParquetWriter(
                sink,
                self.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=self._scalars,  # tokens and logprobs repeat too little: 3 times as fast, and smaller
                write_statistics=self._scalars,
            ) as writer:
                yield writer

    def _row_groups(self, file: SegmentFile) -> Iterator[pa.Table]:
        part = pq.ParquetFile(pa.BufferReader(self.store.read(self.path(file))))
        for number in range(part.num_row_groups):
            yield part.read_row_group(number, use_threads=False).cast(self.schema)

    def _listed(self) -> list[SegmentFile]:
        names = [
            f"{kind}/{name}" for kind in ("segments", "parts") for name in self.store.names(f"{self.folder}/{kind}")
        ]
        return [file for file in map(SegmentFile.parse, names) if file is not None]

    def _schema(self, columns: list[str] | None) -> pa.Schema:
        return self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])

    def _set_aside(self, file: SegmentFile, error: Exception, *, is_last: bool) -> None:
        where = f"{self.store.url}/{self.path(file)}"
        if isinstance(error, StoreError):
            raise error
        if file.part or not is_last:
            raise LaminarError(f"{where} is damaged ({error}): restore it, or move it away to go on without its rows")
        note = f"{where} is torn ({error}): it was never acknowledged and is set aside as .torn"
        self.notes.append(note)
        log.warning(note)
        self.store.rename(self.path(file), f"{self.path(file)}.torn")
        self._next = file.first


def _write_rows(writer: Any, tables: list[pa.Table], nbytes: int) -> None:
    table = pa.concat_tables(tables)
    per_row = max(1, nbytes // max(1, table.num_rows))
    writer.write_table(table, row_group_size=max(1, 2 * _ROW_GROUP_BYTES // per_row))
    pa.default_memory_pool().release_unused()  # else the encoder's pages of each row group stay beside the next one's
