"""Where each row is, and the newest rows in memory up to a byte budget; older ones come from files again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pyarrow as pa

from laminar.experience.segments import SegmentFile, Segments

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
        self._kept: OrderedDict[SegmentFile, pa.Table] = OrderedDict()
        self.nbytes = 0

    def locate(self, file: SegmentFile, trajectory_ids: Sequence[str]) -> None:
        """Note that a file holds these rows, in this order."""
        for offset, name in enumerate(trajectory_ids):
            self._where[name] = (file, offset)

    def keep(self, file: SegmentFile, table: pa.Table) -> None:
        """Keep a file's rows in memory as its newest, and let go of the oldest beyond the budget."""
        self._kept[file] = table
        self.nbytes += table.nbytes
        while self.nbytes > self._memory_bytes:
            self._release(next(iter(self._kept)))

    def compacted(self, part: SegmentFile, trajectory_ids: Sequence[str]) -> None:
        """A part with these rows took the place of segments. It is kept if all of them were."""
        self.locate(part, trajectory_ids)
        files = [file for file in self._kept if part.first <= file.first <= part.last]
        tables = [self._kept[file] for file in files]
        for file in files:
            self._release(file)
        if sum(table.num_rows for table in tables) == len(trajectory_ids):
            self.keep(part, pa.concat_tables(tables))
            self._kept.move_to_end(part, last=False)

    def gather(self, trajectory_ids: Sequence[str]) -> pa.Table:
        """The rows in the order asked for, in one chunk. KeyError for a row that never came."""
        places = [self._where[name] for name in trajectory_ids]
        read = self._read({place for place in places if place[0] not in self._kept})
        rows = [read[at] if at in read else self._kept[at[0]].slice(at[1], 1) for at in places]
        return pa.concat_tables(rows).combine_chunks()

    def _read(self, places: set[tuple[SegmentFile, int]]) -> dict[tuple[SegmentFile, int], pa.Table]:
        """Rows that are not in memory, each file read once."""
        offsets: dict[SegmentFile, list[int]] = {}
        for file, offset in places:
            offsets.setdefault(file, []).append(offset)
        rows: dict[tuple[SegmentFile, int], pa.Table] = {}
        for file, wanted in offsets.items():
            table = self._segments.read_rows(file, wanted)
            rows |= {(file, offset): table.slice(place, 1) for place, offset in enumerate(wanted)}
        return rows

    def _release(self, file: SegmentFile) -> None:
        self.nbytes -= self._kept.pop(file).nbytes
