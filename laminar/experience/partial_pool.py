"""The partial-response pool: what every running trajectory has generated so far, so that it can go on elsewhere.

Attempts of one trajectory are told apart by Dask's ``run_id``, which only grows: once a newer attempt has asked
for the prefix, whatever the older one still sends is refused. All that is accepted is also written to a local
journal, an Arrow stream, so that a restarted data process has it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa

from laminar.errors import UserError
from laminar.experience.store import StoreError

__all__ = ["Item", "Partial", "PartialPool"]

log = logging.getLogger(__name__)

Item = tuple[str, int, int, int, Sequence[int], Sequence[float]]
"""``(key, run_id, version, start, ids, logprobs)``: tokens of a response from position ``start`` on."""

_Line = tuple[str, int, int, int | None, Sequence[int], Sequence[float]]
"""What the journal holds: an item, or one whose ``start`` says that it is a fence or an end."""

_JOURNAL: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("run_id", pa.int64()),
        pa.field("version", pa.int64()),
        pa.field("start", pa.int64()),
        pa.field("ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
    ]
)
_FENCE: Final = None
_DROPPED: Final = -1
_REMEMBERED: Final = 65_536
"""Dropped trajectories whose late tokens are still recognised."""
_REWRITE_BYTES: Final = 16 << 20
"""Journal size from which it is rewritten when most of it is about trajectories that are gone."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A response generated so far, by one weight version: its token ids and their logprobs (natural log)."""

    version: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class _Running:
    run_id: int
    version: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def write(self, run_id: int, version: int, start: int, ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Put tokens at ``start``; False if they do not join on to what is there."""
        joins = version == self.version and start <= len(self.ids)
        if start > 0 and not joins:
            return False
        sent_before = joins and run_id == self.run_id and start + len(ids) <= len(self.ids)
        if not sent_before:
            self.version = version
            self.ids[start:] = ids
            self.logprobs[start:] = logprobs
        return True


class PartialPool:
    """Partial responses by trajectory key.

    Parameters
    ----------
    path
        The journal, a local file. What it holds is taken up again.

    Attributes
    ----------
    refused
        How many items came from attempts that were superseded or dropped, or did not join on to what is there.

    Example
    -------
    >>> import tempfile
    >>> pool = PartialPool(Path(tempfile.mkdtemp()) / "partials.arrow")
    >>> pool.extend([("g0-0", 1, 7, 0, [5, 6], [-0.5, -0.25])])
    1
    >>> pool.resume("g0-0", 2)
    Partial(version=7, ids=(5, 6), logprobs=(-0.5, -0.25))
    >>> pool.extend([("g0-0", 1, 7, 2, [9], [-1.0])])  # the first attempt, late
    0
    >>> pool.extend([("g0-0", 2, 7, 2, [8], [-1.0])]), pool.resume("g0-0", 2).ids
    (1, (5, 6, 8))
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: dict[str, _Running] = {}
        self._dropped: OrderedDict[str, int] = OrderedDict()
        self.refused = 0
        self._torn = False
        for line in _read_journal(path):
            self._accept(line)
        try:
            self._rewrite()
        except OSError as error:
            raise UserError(f"cannot write partial responses to {path}: {error}; give a writable run folder") from error

    def __len__(self) -> int:
        return len(self._running)

    def extend(self, items: Iterable[Item]) -> int:
        """Add tokens that replicas streamed; the number of items accepted.

        An item joins on where its ``start`` is not beyond what is there, and its version is the same: tokens
        sent twice are there once. An item that starts at 0 begins the response anew. Any other is refused, so
        that no response is ever of two versions or has a hole.
        """
        accepted: list[_Line] = []
        for item in items:
            if item[3] < 0:
                raise ValueError(f"{item[0]}: start is {item[3]}")
            if len(item[4]) != len(item[5]):
                raise ValueError(f"{item[0]}: {len(item[5])} logprobs for {len(item[4])} ids")
            if self._accept(item):
                accepted.append(item)
            else:
                self.refused += 1
        self._write(accepted)
        return len(accepted)

    def resume(self, key: str, run_id: int) -> Partial | None:
        """What a new attempt begins with, None if from nothing. Attempts with a lower ``run_id`` are refused
        from here on; so is this one, and gets None, if a higher one was here before."""
        fence: _Line = (key, run_id, 0, _FENCE, (), ())
        if not self._accept(fence):
            self.refused += 1
            return None
        self._write([fence])
        running = self._running[key]
        if not running.ids:
            return None
        return Partial(running.version, tuple(running.ids), tuple(running.logprobs))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget trajectories that are finished or given up. Unknown ones are no error."""
        known = [key for key in keys if key in self._running]
        lines: list[_Line] = [(key, self._running[key].run_id, 0, _DROPPED, (), ()) for key in known]
        for line in lines:
            self._accept(line)
        self._write(lines)

    def close(self) -> None:
        """Close the journal; it stays."""
        self._writer.close()
        self._file.close()

    def _accept(self, line: _Line) -> bool:
        """Change what is in memory; False if the line is refused."""
        key, run_id, version, start, ids, logprobs = line
        running = self._running.get(key)
        if run_id < (running.run_id if running else self._dropped.get(key, -1) + 1):
            return False
        if start == _DROPPED:
            self._running.pop(key, None)
            self._dropped[key] = run_id
            if len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)
            return True
        if running is None:
            running = _Running(run_id)
        if start is not None and not running.write(run_id, version, start, ids, logprobs):
            return False
        running.run_id = run_id
        self._running[key] = running
        return True

    def _write(self, lines: Sequence[_Line]) -> None:
        try:
            if self._torn:  # an earlier write failed: what it left ends the journal, which begins anew
                self._rewrite()
                return
            self._torn = True
            self._put(lines)
            if self._file.tell() > self._rewrite_at:
                self._file.close()
                self._rewrite()
            self._torn = False
        except OSError as error:
            raise StoreError(f"cannot write partial responses to {self._path}: {error}") from error

    def _put(self, lines: Sequence[_Line]) -> None:
        if lines:
            columns = [list(column) for column in zip(*lines, strict=True)]
            arrays = [pa.array(column, kind.type) for column, kind in zip(columns, _JOURNAL, strict=True)]
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_JOURNAL))
            self._file.flush()

    def _rewrite(self) -> None:
        """Begin a new journal with what is there now."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        self._file = temporary.open("wb")
        self._writer = pa.ipc.new_stream(self._file, _JOURNAL)
        self._put([(key, run_id, 0, _DROPPED, (), ()) for key, run_id in self._dropped.items()])
        self._put([(key, at.run_id, at.version, 0, at.ids, at.logprobs) for key, at in self._running.items()])
        temporary.replace(self._path)
        self._torn = False
        self._rewrite_at = max(_REWRITE_BYTES, 2 * self._file.tell())


def _read_journal(path: Path) -> Iterator[_Line]:
    """The items of a journal, up to where its writer died."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (pa.ArrowInvalid, OSError) as error:
        log.warning("%s is torn at its end (%s): its last tokens will be generated again", path, error)
