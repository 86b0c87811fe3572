"""The names of a folder's files, which of them count, and which to merge: pure rules.

::

    segments/000000000065.000002-9f31.arrow              one append, by the owner of the second epoch
    parts/000000000001-000000000064.parquet              what appends 1 to 64 held, in their order
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["SegmentFile", "covered", "live", "merge_due", "unbroken"]


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """One file: the numbers of the appends in it, whether it is a compacted part, and a segment's epoch."""

    first: int
    last: int
    part: bool = False
    epoch: str = ""

    @property
    def name(self) -> str:
        """Path within the folder.

        >>> SegmentFile(65, 65, epoch="000002-9f31").name, SegmentFile(1, 64, part=True).name
        ('segments/000000000065.000002-9f31.arrow', 'parts/000000000001-000000000064.parquet')
        """
        if self.part:
            return f"parts/{self.first:012d}-{self.last:012d}.parquet"
        return f"segments/{self.first:012d}.{self.epoch}.arrow"

    @staticmethod
    def parse(name: str) -> SegmentFile | None:
        """The inverse of ``name``; None for any other file.

        >>> SegmentFile.parse("segments/000000000065.000002-9f31.arrow")
        SegmentFile(first=65, last=65, part=False, epoch='000002-9f31')
        >>> SegmentFile.parse("segments/notes.txt")
        """
        folder, _, base = name.rpartition("/")
        match folder, base.split("."):
            case "segments", [number, epoch, "arrow"] if number.isdigit():
                return SegmentFile(int(number), int(number), epoch=epoch)
            case "parts", [span, "parquet"]:
                first, _, last = span.partition("-")
                if first.isdigit() and last.isdigit():
                    return SegmentFile(int(first), int(last), part=True)
        return None


def live(files: Iterable[SegmentFile]) -> list[SegmentFile]:
    """The files that together hold every row once, in order of append.

    A part takes the place of the segments and parts within it. Of two segments with one number, that of the later
    epoch counts: the other's writer had lost the table, and its append was refused.

    >>> segments = [SegmentFile(n, n, epoch="1") for n in (1, 2, 3)]
    >>> [file.name for file in live([*segments, SegmentFile(1, 2, part=True)])]
    ['parts/000000000001-000000000002.parquet', 'segments/000000000003.1.arrow']
    >>> live([SegmentFile(1, 1, epoch="1"), SegmentFile(1, 1, epoch="2")])
    [SegmentFile(first=1, last=1, part=False, epoch='2')]
    """
    by_epoch = sorted(set(files), key=lambda file: file.epoch, reverse=True)
    kept: list[SegmentFile] = []
    end = 0
    for file in sorted(by_epoch, key=lambda file: (file.first, -file.last, not file.part)):
        if file.last > end:
            kept.append(file)
            end = file.last
    return kept


def covered(files: Sequence[SegmentFile]) -> list[SegmentFile]:
    """The files that no longer count.

    >>> one, two = SegmentFile(1, 1, epoch="1"), SegmentFile(2, 2, epoch="1")
    >>> covered([one, two, SegmentFile(1, 1, part=True)]) == [one]
    True
    """
    return sorted(set(files) - set(live(files)))


def unbroken(files: Sequence[SegmentFile]) -> bool:
    """Whether live files follow each other from the first append on. A listing that was taken while files were
    merged may lack some.

    >>> unbroken([SegmentFile(1, 8, part=True), SegmentFile(9, 9)]), unbroken([SegmentFile(2, 2)])
    (True, False)
    """
    ends = [0, *(file.last for file in files)]
    return all(file.first == end + 1 for file, end in zip(files, ends, strict=False))


def merge_due(sizes: Sequence[int], *, fan: int, cap: int) -> int:
    """How many of the newest parts to merge into one now; 0 for none.

    Parts of about one size (within a factor of ``fan``) are merged when there are ``fan`` of them, so that a row is
    written anew only a few times, however many come. Parts that could grow beyond ``cap`` are left alone.

    Parameters
    ----------
    sizes
        Bytes of the parts, oldest first.

    Example
    -------
    >>> merge_due([900, 10, 9, 11], fan=4, cap=10_000), merge_due([900, 10, 9, 11, 10], fan=4, cap=10_000)
    (0, 4)
    >>> merge_due([60, 50, 70, 40], fan=4, cap=10_000), merge_due([60, 50, 70, 40], fan=4, cap=160)
    (4, 0)
    """
    if not sizes:
        return 0
    limit = min(cap // fan, max(1, sizes[-1]) * fan)
    count = 0
    for size in reversed(sizes):
        if size >= limit:
            break
        count += 1
    return count if count >= fan else 0
