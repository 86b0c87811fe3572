"""Where each row is, and the newest rows in memory up to a byte budget; older ones come from files again.

Rows are numbered in the order in which they were appended. A part holds the rows of the files that it covers in
that same order, so a row's number stays, and a compaction only changes which file holds a span of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pyarrow as pa

from laminar.experience.gather import gather
from laminar.experience.segment_files import SegmentFile
from laminar.experience.segments import Segments

__all__ = ["Payloads"]

_COLUMN_BYTES = 350
"""What one column of one batch costs beside its values: Arrow's own objects. Measured; more than the values where a
batch has a few short rows."""
_JOINED_BYTES = 16 << 20
"""Up to this size the rows of a part are copied into one chunk; beyond it the copy would cost more than it saves."""
_GIVE_BACK_BYTES = 4 << 20
"""How much goes before Arrow is told to give its memory back to the system: it takes about a millisecond, and Arrow
would keep up to the budget once more."""


class Payloads:
    """The rows' columns by trajectory id.

    Parameters
    ----------
    segments
        The files that hold them all.
    memory_bytes
        Most bytes of rows to keep in memory, Arrow's own objects counted; the files written first go first.
    """

    def __init__(self, segments: Segments, memory_bytes: int) -> None:
        self._segments = segments
        self._memory_bytes = memory_bytes
        self._number: dict[str, int] = {}
        self._rows = 0
        self._files: list[SegmentFile] = []
        self._starts: list[int] = []  # of each file, the number of its first row
        self._kept: OrderedDict[SegmentFile, tuple[pa.Table, int]] = OrderedDict()
        self._let_go = 0  # bytes since Arrow gave its memory back
        self.nbytes = 0

    def locate(self, file: SegmentFile, trajectory_ids: Sequence[str]) -> None:
        """Note that the next file holds these rows, in this order."""
        self._files.append(file)
        self._starts.append(self._rows)
        end = self._rows + len(trajectory_ids)
        self._number.update(zip(trajectory_ids, range(self._rows, end), strict=True))
        self._rows = end

    def keep(self, file: SegmentFile, table: pa.Table) -> None:
        """Keep a file's rows in memory as its newest, and let go of the oldest beyond the budget."""
        size = table.get_total_buffer_size() + _COLUMN_BYTES * table.num_columns * table.column(0).num_chunks
        self._kept[file] = (table, size)
        self.nbytes += size
        while self.nbytes > self._memory_bytes:
            self._release(next(iter(self._kept)))
        if self._let_go >= _GIVE_BACK_BYTES:
            pa.default_memory_pool().release_unused()
            self._let_go = 0

    def compacted(self, part: SegmentFile) -> None:
        """A part took the place of the files that it covers. It is kept if all of them were."""
        first = bisect_left(self._files, part.first, key=lambda file: file.first)
        end = bisect_right(self._files, part.last, key=lambda file: file.last)
        files = self._files[first:end]
        tables = [self._kept[file][0] for file in files if file in self._kept]
        for file in files:
            if file in self._kept:
                self._release(file)
        self._files[first:end], self._starts[first:end] = [part], [self._starts[first]]
        if len(tables) == len(files):
            table = pa.concat_tables(tables)
            small = table.get_total_buffer_size() < _JOINED_BYTES
            self.keep(part, table.combine_chunks() if small else table)
            self._kept.move_to_end(part, last=False)

    def gather(self, trajectory_ids: Sequence[str]) -> pa.Table:
        """The rows in the order asked for, in one chunk. KeyError for a row that never came."""
        runs = list(self._runs([self._number[name] for name in trajectory_ids]))
        wanted: dict[SegmentFile, list[tuple[int, int]]] = {}
        for file, start, count in runs:
            wanted.setdefault(file, []).append((start, count))
        tables: list[pa.Table] = []
        at: dict[SegmentFile, tuple[int, dict[int, int]]] = {}
        for file, mine in wanted.items():
            if file in self._kept:
                at[file] = (len(tables), {start: start for start, _ in mine})
                tables.append(self._kept[file][0])
            else:
                offsets = [start + n for start, count in mine for n in range(count)]
                at[file] = (len(tables), {offset: place for place, offset in enumerate(offsets)})
                tables.append(self._segments.read_rows(file, offsets))
        return gather(tables, [(at[file][0], at[file][1][start], count) for file, start, count in runs])

    def _runs(self, numbers: Sequence[int]) -> Iterator[tuple[SegmentFile, int, int]]:
        """``(file, start, count)``: rows that follow each other, in the order asked for."""
        begin = 0
        while begin < len(numbers):
            first = numbers[begin]
            place = bisect_right(self._starts, first) - 1
            start = self._starts[place]
            stop = self._starts[place + 1] if place + 1 < len(self._starts) else self._rows
            end = begin + 1
            while end < len(numbers) and numbers[end] == numbers[end - 1] + 1 < stop:
                end += 1
            yield self._files[place], first - start, end - begin
            begin = end

    def _release(self, file: SegmentFile) -> None:
        size = self._kept.pop(file)[1]
        self.nbytes -= size
        self._let_go += size
