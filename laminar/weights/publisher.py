"""The trainer's half: one copy of the weights into a free slot, and on with the training.

It needs only the files. A relay that is dead or slow does not hold it up; whoever owns the segment next
finds the version staged there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from laminar.weights.attachment import Attachment
from laminar.weights.checksum import digest
from laminar.weights.segment import STAGED
from laminar.weights.slots import staging
from laminar.weights.tensors import fill

__all__ = ["Published", "Publisher"]


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
        stage = staging(
            self._attachment, version, STAGED, check=lambda layout: layout.check(tensors), deadline=self._deadline
        )
        with stage as (segment, slot):
            waited = time.perf_counter() - started
            slot.hashes = hashes = fill(slot.payload, tensors, segment.layout)
            slot.digest = whole = digest(hashes)
        return Published(version, whole, segment.layout.nbytes, time.perf_counter() - started, waited)

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._attachment.close()
