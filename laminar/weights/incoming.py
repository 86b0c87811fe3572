"""A version on its way into a slot: filled range by range, each chunk proven by its hash, read by nobody yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from laminar.errors import LaminarError
from laminar.weights.checksum import digest
from laminar.weights.locks import release
from laminar.weights.mapping import Slot
from laminar.weights.prefix import Prefix
from laminar.weights.segment import SLOT_HASHES, header_bytes

__all__ = ["Damaged", "Incoming", "Range", "Source"]


class Damaged(LaminarError):
    """A chunk arrived with other bytes than were sent. It is asked for again."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sender finds a version: a slot's file, the byte in it where the flat buffer starts, and how far
    the buffer is filled."""

    path: Path
    base: int
    payload: memoryview
    prefix: Prefix

    @classmethod
    def of(cls, slot: Slot, prefix: Prefix) -> Source:
        """A slot that whoever sends keeps from being recycled."""
        return cls(slot.path, header_bytes(slot.layout), slot.payload, prefix)


class Range:
    """One range of an incoming version: what it must hash to, and how far it is filled and proven."""

    def __init__(self, slot: Slot, start: int, stop: int) -> None:
        self.slot = slot
        self.prefix = Prefix(start, stop)
        self._hash = xxhash.xxh3_64()
        self._hashed = start

    def expect(self, hashes: Sequence[int]) -> None:
        """Write down the hash of each chunk of the range. Raises ``LaminarError`` if their number is wrong."""
        layout = self.slot.layout
        first = self.prefix.start // layout.chunk_bytes
        count = -(-(self.prefix.stop - self.prefix.start) // layout.chunk_bytes)
        if len(hashes) != count:
            raise LaminarError(f"{len(hashes)} checksums came for {count} chunks of layout {layout.hash}")
        for index, value in enumerate(hashes, SLOT_HASHES + first):
            self.slot.words[index] = value

    @property
    def proven(self) -> bool:
        """Whether all of it is there and matches its hashes."""
        return self._hashed >= self.prefix.stop

    def prove(self) -> None:
        """All of it is there and was proven by somebody else."""
        self._hashed = self.prefix.stop
        self.prefix.move(self.prefix.stop)

    def arrived(self, offset: int) -> None:
        """Bytes up to ``offset`` are in the buffer: tell the senders, then prove the chunks that are complete.

        Raises
        ------
        Damaged
            A chunk does not match. It counts as not there any more, here and for those who forward it.
        """
        self.prefix.move(offset)
        layout = self.slot.layout
        while self._hashed < offset:
            chunk = self._hashed // layout.chunk_bytes
            start, stop = layout.span(chunk)
            end = min(offset, stop)
            self._hash.update(self.slot.payload[self._hashed : end])
            self._hashed = end
            if end < stop:
                return
            found = self._hash.intdigest()
            self._hash.reset()
            if found != self.slot.words[SLOT_HASHES + chunk]:
                self._hashed = start
                self.prefix.move(start)
                raise Damaged(f"bytes {start} to {stop} arrived damaged in {self.slot.path}; they are asked for again")


class Incoming:
    """A slot that a version is being received into, in one or several ranges. Held by an exclusive lock.

    Parameters
    ----------
    slot, lock
        The slot to fill and the lock on it, which ends with ``abandon`` or with the owner's ``commit``.
    """

    def __init__(self, version: int, slot: Slot, lock: int, parts: int) -> None:
        slot.stamp = None  # before the first byte changes
        self.version = version
        self.slot = slot
        self.lock: int | None = lock
        self.parts = parts
        self._mutex = threading.Lock()
        self._ranges: dict[int, Range] = {}

    def range(self, part: int, start: int, stop: int) -> Range:
        """The range number ``part``; begun now, or earlier by another connection."""
        with self._mutex:
            found = self._ranges.get(part)
            if found is None:
                found = self._ranges[part] = Range(self.slot, start, stop)
            return found

    @property
    def whole(self) -> bool:
        """Whether every range is there and proven."""
        with self._mutex:
            return len(self._ranges) == self.parts and all(it.proven for it in self._ranges.values())

    def seal(self, expected: str) -> str:
        """Write the digest over all chunks' hashes into the slot; the digest.

        Raises
        ------
        LaminarError
            It is not the ``expected`` one (empty: nobody knew it before).
        """
        found = digest(self.slot.hashes)
        if expected and found != expected:
            raise LaminarError(
                f"version {self.version} in {self.slot.path} has digest {found}, its sender said {expected}"
            )
        self.slot.digest = found
        return found

    def abandon(self) -> None:
        """Give the slot back as an empty one. Idempotent; nothing happens after ``commit``."""
        with self._mutex:
            if self.lock is not None:
                release(self.lock)
                self.lock = None
