"""Which slot a new version may overwrite: for the trainer that publishes one and the relay that receives one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from laminar.errors import LaminarError
from laminar.weights.attachment import Attachment
from laminar.weights.layout import Layout
from laminar.weights.locks import POLL, holders, named, release
from laminar.weights.mapping import Segment, Slot

__all__ = ["free_slot", "slots_to_fill", "staging"]


@contextmanager
def staging(
    attachment: Attachment, version: int, state: int, *, check: Callable[[Layout], None], deadline: float
) -> Iterator[tuple[Segment, Slot]]:
    """A free slot for a trainer to fill. On leaving it holds ``version`` in that state; after an error, nothing.

    Raises
    ------
    ValueError
        The version is not newer than the newest that can be read.
    LaminarError
        Nothing is prepared; whatever ``check`` raises of the segment's layout.
    TimeoutError
        No slot came free; the message says which process pins which.
    """
    try:
        segment = attachment.segment()
        if segment.head is not None and version <= segment.head[0]:
            raise ValueError(f"version {version} is not newer than {segment.head[0]}, the newest under {segment.root}")
        check(segment.layout)
        slot, lock = free_slot(segment, version, deadline=deadline)
    except FileNotFoundError as error:
        message = f"{attachment.root} holds no segment: its relay has not prepared one, or has ended"
        raise LaminarError(message) from error
    try:
        slot.stamp = None  # before the first byte changes
        yield segment, slot
        slot.stamp = (version, state)
    finally:
        release(lock)


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
