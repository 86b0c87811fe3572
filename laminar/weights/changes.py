"""A version's changes on their way: encoded where they arise, forwarded as they come in, applied where they end."""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from laminar.errors import LaminarError
from laminar.weights import delta
from laminar.weights.checksum import THREADS, chunk_hashes
from laminar.weights.incoming import Range, Source
from laminar.weights.mapping import Slot
from laminar.weights.prefix import Prefix

__all__ = ["Changes", "changes_between"]


class Changes:
    """Encoded changes from version ``base``, in shared memory that has no name: a dead process leaves nothing."""

    def __init__(self, folder: Path, base: int, nbytes: int, checksum: str) -> None:
        self.base = base
        self.nbytes = nbytes
        self.checksum = checksum
        self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        os.posix_fallocate(self._file, 0, nbytes)
        self.payload = memoryview(mmap.mmap(self._file, nbytes))
        self.prefix = Prefix(0, nbytes)

    @property
    def source(self) -> Source:
        """Where a sender finds them."""
        return Source(Path(f"/proc/self/fd/{self._file}"), 0, self.payload, self.prefix)

    def offer(self) -> dict[str, Any]:
        """What a sender says of them in HELLO."""
        return {"base": self.base, "nbytes": self.nbytes, "checksum": self.checksum}

    def make(self, old: Slot, new: Range) -> None:
        """Make the new version of the old one, and prove it.

        Raises
        ------
        LaminarError
            The changes are damaged, or what comes out is not what was sent.
        """
        if xxhash.xxh3_64_hexdigest(self.payload) != self.checksum:
            raise LaminarError(f"the changes from version {self.base} arrived damaged")
        into = new.slot.payload
        _copy(old.payload, into)
        delta.apply(into, self.payload)
        if chunk_hashes(into, new.slot.layout) != new.slot.hashes:
            raise LaminarError(f"the changes do not fit version {self.base} as it is here")
        new.prove()


def changes_between(folder: Path, base: int, old: Slot, new: Slot, rate: float) -> Changes | None:
    """The changes to send, where they get there sooner than the whole version at ``rate`` bytes/s; else None."""
    word = delta.word_bytes(new.layout)
    share = delta.sampled_share(old.payload, new.payload, word)
    if not delta.worth_it(new.layout.nbytes, share, rate, word=word):
        return None
    encoded = delta.encode(old.payload, new.payload, word)
    if not 0 < len(encoded) < new.layout.nbytes // 2:
        return None
    changes = Changes(folder, base, len(encoded), xxhash.xxh3_64_hexdigest(encoded))
    changes.payload[:] = encoded
    changes.prefix.move(len(encoded))
    return changes


def _copy(source: memoryview, target: memoryview) -> None:
    step = 8 << 20
    old, new = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)

    def piece(start: int) -> None:
        np.copyto(new[start : start + step], old[start : start + step])

    with ThreadPoolExecutor(THREADS, "laminar-copy") as pool:
        list(pool.map(piece, range(0, len(old), step)))
