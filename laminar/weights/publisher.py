"""The trainer's half: one copy of the weights into a free slot, and on with the training.

It needs only the files. A relay that is dead or slow does not hold it up; whoever owns the segment next
finds the version staged there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from laminar.errors import LaminarError
from laminar.weights.attachment import Attachment
from laminar.weights.checksum import digest
from laminar.weights.locks import POLL, holders, named, release
from laminar.weights.mapping import Segment, Slot
from laminar.weights.segment import STAGED
from laminar.weights.tensors import fill

__all__ = ["Published", "Publisher", "slots_to_fill"]


@dataclass(frozen=True, slots=True)
class Published:
    """A version staged for the relay. ``nbytes``: size of the flat buffer; ``seconds``: the trainer's
    stall, of which ``waited`` was for a free slot."""

    version: int
    digest: str
    nbytes: int
    seconds: float
    waited: float


class Publisher:
    """Stages versions in the segment at ``root``, which a ``SegmentOwner`` has prepared (before the first
    ``publish``, not before this).

    Parameters
    ----------
    deadline
        Seconds to wait for a slot while readers pin all of them.
    """

    def __init__(self, root: Path, *, deadline: float = 10.0) -> None:
        self.root = root
        self._deadline = deadline
        self._attachment = Attachment(root, writable=True)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Published:
        """Copy tensors (any device) into a free slot and stage them as ``version``. Blocking: for a thread.

        The same version may be staged again as long as no relay has made it the newest. A process that dies
        in the middle leaves an empty slot; readers never see it.

        Raises
        ------
        ValueError
            The version is not newer than the newest that can be read.
        LaminarError
            Nothing is prepared, or the tensors are not those of the layout.
        TimeoutError
            No slot came free; the message says which process pins which.
        """
        started = time.perf_counter()
        try:
            segment = self._attachment.segment()
            _check_grows(segment, version)
            segment.layout.check(tensors)
            slot, lock = self._free_slot(segment, version)
        except FileNotFoundError as error:
            message = f"{self.root} holds no segment: its relay has not prepared one, or has ended"
            raise LaminarError(message) from error
        waited = time.perf_counter() - started
        try:
            slot.stamp = None  # before the first byte changes
            slot.hashes = hashes = fill(slot.payload, tensors, segment.layout)
            slot.digest = whole = digest(hashes)
            slot.stamp = (version, STAGED)
        finally:
            release(lock)
        return Published(version, whole, segment.layout.nbytes, time.perf_counter() - started, waited)

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._attachment.close()

    def _free_slot(self, segment: Segment, version: int) -> tuple[Slot, int]:
        """A slot that is not the newest and that nobody reads, and the exclusive lock on it."""
        until = time.monotonic() + self._deadline
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
                raise TimeoutError(f"no slot free for version {version} in {self._deadline:g} s: {_pins(segment)}")
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


def _check_grows(segment: Segment, version: int) -> None:
    head = segment.head
    if head is not None and version <= head[0]:
        raise ValueError(f"version {version} is not newer than {head[0]}, the newest under {segment.root}")


def _pins(segment: Segment) -> str:
    said = []
    for index, slot in enumerate(segment.slots):
        of = f"slot {index} (version {slot.stamp[0]})" if slot.stamp else f"slot {index}"
        newest = segment.head is not None and segment.head[1] == index
        said.append(f"{of} is the newest" if newest else f"{of} is pinned by {named(holders(slot.path))}")
    return f"{segment.root}: {', '.join(said)}"
