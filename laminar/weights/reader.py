"""The replica's half: pin a version, use it where it lies, let it go. It asks nobody."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.weights.attachment import Attachment
from laminar.weights.locks import POLL, release
from laminar.weights.mapping import Segment, Slot
from laminar.weights.segment import PUBLISHED

if TYPE_CHECKING:
    import torch

__all__ = ["Pinned", "Pulled", "WeightReader"]

DEADLINE = 5.0
"""Seconds to pin a version that is held; only a writer that overtakes us every time could take so long."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A version that stays as it is while it is pinned. ``slot.payload`` is its flat buffer, read-only."""

    version: int
    digest: str
    slot: Slot


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pinned version as tensors: read-only views of the shared memory, taken away when the pull ends."""

    version: int
    digest: str
    tensors: dict[str, torch.Tensor]


class WeightReader:
    """Reads versions from the segment at ``root``, which need not be there yet. For use from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._attachment = Attachment(root, writable=False)

    def newest(self) -> int | None:
        """The newest version that can be pulled; None before the first."""
        return max(self.held(), default=None)

    def held(self) -> list[int]:
        """The versions that can be pulled now, newest last. An older one may be gone the next moment."""
        try:
            return list(self._attachment.segment().published())
        except FileNotFoundError:
            return []

    @contextmanager
    def pull(self, version: int | None = None, *, verify: bool = True) -> Iterator[Pulled]:
        """Pin a version (None: the newest) and give its tensors, without a copy.

        Parameters
        ----------
        verify
            Hash every chunk again (65 ms a GiB and core) before the tensors are handed out.

        Raises
        ------
        LookupError
            The version is not here; the message names those that are.
        LaminarError
            The bytes do not match their checksums.
        """
        version, slot, lock = self._pin(version)
        tensors: dict[str, torch.Tensor] = {}
        try:
            if verify:
                slot.verify()
            tensors.update(slot.views or _views(slot))
            yield Pulled(version, slot.digest, tensors)
        finally:
            tensors.clear()  # without the pin the bytes may change
            release(lock)

    @contextmanager
    def pin(self, version: int | None = None) -> Iterator[Pinned]:
        """Keep a version (None: the newest) from being recycled. Needs no torch. Raises as ``pull``."""
        version, slot, lock = self._pin(version)
        try:
            yield Pinned(version, slot.digest, slot)
        finally:
            release(lock)

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._attachment.close()

    def _pin(self, asked: int | None) -> tuple[int, Slot, int]:
        if asked is None and (pinned := _pin_newest(self._attachment.mapped)):
            return pinned
        until = time.monotonic() + DEADLINE
        while True:
            version, slot = self._find(asked)
            lock = _pin_as(version, slot)
            if lock is not None:
                return version, slot, lock
            # Recycled between our look and our lock: look again.
            if time.monotonic() > until:
                raise TimeoutError(f"version {version} in {self.root} was not pinned in {DEADLINE:g} s")
            time.sleep(POLL)

    def _find(self, asked: int | None) -> tuple[int, Slot]:
        try:
            held = self._attachment.segment().published()
        except FileNotFoundError as error:
            raise LookupError(f"nothing is published under {self.root}: its relay is not ready, or ended") from error
        version = max(held, default=None) if asked is None else asked
        if version is None or version not in held:
            what = "no version" if version is None else f"version {version} not"
            raise LookupError(f"{what} held under {self.root}; held: {list(held)}")
        return version, held[version]


def _pin_newest(segment: Segment | None) -> tuple[int, Slot, int] | None:
    """The quick way, which nearly always leads there: what the head says, in the files that were mapped before. (The
    lock tells whether they still stand.)"""
    head = segment.head if segment is not None else None
    if segment is None or head is None:
        return None
    version, slot = head[0], segment.slots[head[1]]
    lock = _pin_as(version, slot)
    return None if lock is None else (version, slot, lock)


def _pin_as(version: int, slot: Slot) -> int | None:
    """The lock on a slot that still holds a version; None if it does not, or not any more."""
    lock = slot.pin()
    if lock is not None and slot.stamp != (version, PUBLISHED):
        release(lock)
        return None
    return lock


def _views(slot: Slot) -> dict[str, torch.Tensor]:
    """The tensors of a slot, made once."""
    from laminar.weights.tensors import views

    with warnings.catch_warnings():  # torch warns that the buffer is read-only, as it shall be
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        slot.views = views(slot.payload, slot.layout)
    return slot.views
