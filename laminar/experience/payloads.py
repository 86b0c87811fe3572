"""Where each row is, and the newest rows in memory up to a byte budget; older ones come from files again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pyarrow as pa

from laminar.experience.gather import gather
from laminar.experience.segment_files import SegmentFile
from laminar.experience.segments import Segments

__all__ = ["Payloads"]


class Payloads:
    """The rows' columns by trajectory id.

    Parameters
    ----------
    segments
        The files that hold them all.
    memory_bytes
        Most bytes of rows to keep in memory; the files written first go first.
    """

    def __init__(self, segments: Segments, memory_bytes: int) -> None:
        self._segments = segments
        self._memory_bytes = memory_bytes
        self._where: dict[str, tuple[SegmentFile, int]] = {}
        self._kept: OrderedDict[SegmentFile, tuple[pa.Table, int]] = OrderedDict()
        self.nbytes = 0

    def locate(self, file: SegmentFile, trajectory_ids: Sequence[str]) -> None:
        """Note that a file holds these rows, in this order."""
        for offset, name in enumerate(trajectory_ids):
            self._where[name] = (file, offset)

    def keep(self, file: SegmentFile, table: pa.Table) -> None:
        """Keep a file's rows in memory as its newest, and let go of the oldest beyond the budget."""
        size = table.nbytes
        self._kept[file] = (table, size)
        self.nbytes += size
        while self.nbytes > self._memory_bytes:
            self._release(next(iter(self._kept)))

    def compacted(self, part: SegmentFile, trajectory_ids: Sequence[str]) -> None:
        """A part with these rows took the place of files. It is kept if all of them were."""
        self.locate(part, trajectory_ids)
        files = [file for file in self._kept if part.first <= file.first <= part.last]
        tables = [self._kept[file][0] for file in files]
        for file in files:
            self._release(file)
        if sum(table.num_rows for table in tables) == len(trajectory_ids):
            self.keep(part, pa.concat_tables(tables))
            self._kept.move_to_end(part, last=False)

    def gather(self, trajectory_ids: Sequence[str]) -> pa.Table:
        """The rows in the order asked for, in one chunk. KeyError for a row that never came."""
        runs: list[tuple[SegmentFile, int, int]] = []
        file, start, end = None, 0, 0
        for name in trajectory_ids:
            here, offset = self._where[name]
            if here is not file or offset != end:
                if file is not None:
                    runs.append((file, start, end - start))
                file, start = here, offset
            end = offset + 1
        assert file is not None, "no rows asked for"
        runs.append((file, start, end - start))
        return self._gather(runs)

    def _gather(self, runs: Sequence[tuple[SegmentFile, int, int]]) -> pa.Table:
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

    def _release(self, file: SegmentFile) -> None:
        self.nbytes -= self._kept.pop(file)[1]
