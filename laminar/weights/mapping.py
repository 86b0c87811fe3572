"""A segment's files mapped into this process, with names for their words."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from laminar.errors import LaminarError
from laminar.weights.checksum import chunk_hashes, digest
from laminar.weights.layout import Layout
from laminar.weights.locks import EXCLUSIVE, SHARED, release, try_lock
from laminar.weights.pages import map_file, populate
from laminar.weights.segment import (
    HEAD_LAYOUT,
    HEAD_SLOTS,
    HEAD_WORD,
    MAGIC,
    PAGE,
    PUBLISHED,
    SLOT_DIGEST,
    SLOT_HASHES,
    SLOT_LAYOUT,
    SLOT_STAMP,
    header_bytes,
    pack_word,
    slot_bytes,
    unpack_word,
)

__all__ = ["Segment", "Slot"]


class Slot:
    """One slot's file, mapped. Its fields are read where they lie and change under whoever holds no lock."""

    def __init__(self, path: Path, layout: Layout, *, writable: bool) -> None:
        self.path = path
        self.layout = layout
        start = header_bytes(layout)
        self._file = str(path)
        self._view, self._inode = _map(path, slot_bytes(layout), writable=writable)
        self.views: dict[str, Any] | None = None
        """The tensors that lie in it, once a reader made them."""
        self.words = self._view[:start].cast("Q")
        self.payload = self._view[start:]
        if self.words[0] != MAGIC or self.words[SLOT_LAYOUT] != int(layout.hash, 16):
            raise LaminarError(f"{path} is not a slot of layout {layout.hash}: remove {path.parent}")

    @property
    def stamp(self) -> tuple[int, int] | None:
        """(version, ``STAGED`` or ``PUBLISHED``), or None while the slot holds nothing whole."""
        word = self.words[SLOT_STAMP]
        return unpack_word(word) if word else None

    @stamp.setter
    def stamp(self, value: tuple[int, int] | None) -> None:
        self.words[SLOT_STAMP] = pack_word(*value) if value else 0

    @property
    def digest(self) -> str:
        """Digest over the chunks' hashes, as the trainer wrote it."""
        return f"{self.words[SLOT_DIGEST]:016x}"

    @digest.setter
    def digest(self, value: str) -> None:
        self.words[SLOT_DIGEST] = int(value, 16)

    @property
    def hashes(self) -> list[int]:
        """xxh3_64 of each chunk, as the trainer wrote them."""
        return self.words[SLOT_HASHES : SLOT_HASHES + self.layout.chunks].tolist()

    @hashes.setter
    def hashes(self, values: list[int]) -> None:
        for index, value in enumerate(values, SLOT_HASHES):
            self.words[index] = value

    def holds(self, version: int) -> bool:
        """Whether the slot holds this version whole, readable or not."""
        stamp = self.stamp
        return stamp is not None and stamp[0] == version

    def claim(self) -> int | None:
        """An exclusive lock (to ``locks.release``): the slot may be filled. None while somebody uses it."""
        return try_lock(self.path, EXCLUSIVE)

    def pin(self) -> int | None:
        """A shared lock (to ``locks.release``): nobody fills the slot meanwhile. None while somebody does, or
        where the file is gone, or another stands in its place."""
        try:
            lock = try_lock(self._file, SHARED)
        except FileNotFoundError:
            return None
        if lock is not None and os.fstat(lock).st_ino != self._inode:
            release(lock)
            return None
        return lock

    def populate(self) -> None:
        """Enter every page into this process's tables now, so that the first version is not slower than later ones."""
        populate(self._view)

    def verify(self) -> None:
        """Raise ``LaminarError`` unless every chunk matches its hash and they their digest. Pin it before."""
        written, stamp = self.hashes, self.stamp
        what = f"version {stamp[0] if stamp else '?'} in {self.path} is damaged"
        found = chunk_hashes(self.payload, self.layout)
        for chunk, expected in enumerate(written):
            if found[chunk] != expected:
                start, stop = self.layout.span(chunk)
                raise LaminarError(
                    f"{what}: bytes {start} to {stop} (chunk {chunk + 1} of {self.layout.chunks}) "
                    "do not match their checksum; publish it again"
                )
        if digest(written) != self.digest:
            raise LaminarError(f"{what}: its digest does not match its checksums; publish it again")


class Segment:
    """The head and the slots of a folder, mapped by one process.

    Raises
    ------
    FileNotFoundError
        Nothing has been prepared there (yet, or any more).
    LaminarError
        The files are damaged or of another format: one line that names the file.
    """

    def __init__(self, root: Path, *, writable: bool) -> None:
        self.root = root
        self.layout = _read_layout(root)
        self._head = str(root / "head")
        mapped, self._inode = _map(root / "head", PAGE, writable=writable)
        self.words = mapped.cast("Q")
        if self.words[0] != MAGIC or self.words[HEAD_LAYOUT] != int(self.layout.hash, 16):
            raise LaminarError(f"{root}/head does not belong to layout {self.layout.hash}: remove {root}")
        count = self.words[HEAD_SLOTS]
        self.slots = [Slot(root / f"slot{i}", self.layout, writable=writable) for i in range(count)]

    @property
    def head(self) -> tuple[int, int] | None:
        """(version, index of its slot) of the newest readable version; None before the first."""
        word = self.words[HEAD_WORD]
        version, tag = unpack_word(word)
        return (version, tag - 1) if word else None

    @head.setter
    def head(self, value: tuple[int, int]) -> None:
        self.words[HEAD_WORD] = pack_word(value[0], value[1] + 1)

    def published(self) -> dict[int, Slot]:
        """The versions that can be read now and their slots, oldest first. Never empty once there is a head."""
        while True:
            head = self.head
            stamps = [(slot.stamp, slot) for slot in self.slots]
            if head is None:
                return {}
            if head == self.head:  # else all we saw may have been recycled while we looked
                whole = [(s[0], slot) for s, slot in stamps if s and s[1] == PUBLISHED and s[0] <= head[0]]
                return dict(sorted(whole, key=lambda pair: pair[0]))

    def stands(self) -> bool:
        """Whether these files are still the ones at ``root``: not after a graceful end or a new layout."""
        try:
            return os.stat(self._head).st_ino == self._inode  # noqa: PTH116 - pathlib takes five times as long
        except FileNotFoundError:
            return False

    @cached_property
    def nbytes(self) -> int:
        """Bytes of shared memory in use."""
        return PAGE + len(self.slots) * slot_bytes(self.layout)


def _read_layout(root: Path) -> Layout:
    try:
        return Layout.from_json((root / "layout.json").read_text())
    except ValueError as error:
        raise LaminarError(f"{root}/layout.json: {error}: remove {root}") from error


def _map(path: Path, nbytes: int, *, writable: bool) -> tuple[memoryview, int]:
    """Map a whole file, through a descriptor that is used for nothing else (see ``locks``); the map and the inode."""
    with path.open("r+b" if writable else "rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size != nbytes:
            raise LaminarError(f"{path} has {stat.st_size} bytes, expected {nbytes}: truncated, or of another layout")
        return map_file(file, nbytes, writable=writable), stat.st_ino
