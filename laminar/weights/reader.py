"""The replica's half: pin a version, use it where it lies, let it go. It asks nobody."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from laminar.weights.attachment import Attachment
from laminar.weights.locks import POLL, release
from laminar.weights.mapping import Slot
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
        self._views: WeakKeyDictionary[Slot, dict[str, torch.Tensor]] = WeakKeyDictionary()

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
        with self.pin(version) as pinned:
            if verify:
                pinned.slot.verify()
            pulled = Pulled(pinned.version, pinned.digest, dict(self._tensors(pinned.slot)))
            try:
                yield pulled
            finally:
                pulled.tensors.clear()  # without the pin the bytes may change

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
        until = time.monotonic() + DEADLINE
        while True:
            version, slot = self._find(asked)
            lock = slot.pin()
            if lock is not None:
                if slot.stamp == (version, PUBLISHED):
                    return version, slot, lock
                release(lock)
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

    def _tensors(self, slot: Slot) -> dict[str, torch.Tensor]:
        """The views of a slot, made once."""
        from laminar.weights.tensors import views

        if slot not in self._views:
            with warnings.catch_warnings():  # torch warns that the buffer is read-only, as it shall be
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._views[slot] = views(slot.payload, slot.layout)
        return self._views[slot]
