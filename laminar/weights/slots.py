"""Which slot a new version may overwrite: for the trainer that publishes one and the relay that receives one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from laminar.weights.locks import POLL, holders, named, release
from laminar.weights.mapping import Segment, Slot

__all__ = ["free_slot", "slots_to_fill"]


def free_slot(segment: Segment, version: int, *, deadline: float) -> tuple[Slot, int]:
    """A slot that is not the newest and that nobody reads, and the exclusive lock on it (to ``locks.release``).

    Raises
    ------
    TimeoutError
        None came free in ``deadline`` seconds; the message says which process pins which.
    """
    until = time.monotonic() + deadline
    while True:
        stamps = [slot.stamp for slot in segment.slots]
        for index in slots_to_fill(version, segment.head, stamps):
            lock = segment.slots[index].claim()
            if lock is None:
                continue
            head = segment.head
            if head is None or head[1] != index:
                return segment.slots[index], lock
            release(lock)  # the relay made it the newest just before
        if time.monotonic() > until:
            raise TimeoutError(f"no slot free for version {version} in {deadline:g} s: {_pins(segment)}")
        time.sleep(POLL)


def slots_to_fill(version: int, head: tuple[int, int] | None, stamps: Sequence[tuple[int, int] | None]) -> list[int]:
    """Slots that may be overwritten by a version, best first: empty ones, then the oldest; never the newest.

    What was staged as this version or a later one, but never became readable, is worth nothing: it is what a
    trainer left that died, or what the relay refused.

    Parameters
    ----------
    head
        (version, slot) of the newest readable version.
    stamps
        For each slot (version, ``STAGED`` (1) or ``PUBLISHED`` (2)), or None if it is empty.

    Example
    -------
    >>> slots_to_fill(9, (7, 1), [(8, 1), (7, 2), (6, 2), None])
    [3, 2, 0]
    >>> slots_to_fill(8, (7, 1), [(8, 1), (7, 2), (6, 2)])
    [0, 2]
    """

    def worth(index: int) -> int:
        stamp = stamps[index]
        return -1 if stamp is None or stamp[0] >= version else stamp[0]

    free = (index for index in range(len(stamps)) if head is None or index != head[1])
    return sorted(free, key=worth)


def _pins(segment: Segment) -> str:
    said = []
    for index, slot in enumerate(segment.slots):
        of = f"slot {index} (version {slot.stamp[0]})" if slot.stamp else f"slot {index}"
        newest = segment.head is not None and segment.head[1] == index
        said.append(f"{of} is the newest" if newest else f"{of} is pinned by {named(holders(slot.path))}")
    return f"{segment.root}: {', '.join(said)}"
