"""The relay's half: prepares a host's segment, makes staged versions readable once proven whole. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laminar.errors import LaminarError
from laminar.weights import segment as files
from laminar.weights.incoming import Damaged, Incoming
from laminar.weights.layout import Layout
from laminar.weights.locks import EXCLUSIVE, hold, release
from laminar.weights.mapping import Segment, Slot
from laminar.weights.segment import PARTIAL, PUBLISHED
from laminar.weights.shards import Shard
from laminar.weights.slots import free_slot

__all__ = ["OwnerStatus", "Promoted", "SegmentOwner"]


@dataclass(frozen=True, slots=True)
class Promoted:
    """A version that can be read now. ``seconds``: time to prove it whole."""

    version: int
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """What a relay holds: the newest version, all that can be read (newest last), bytes of shared memory."""

    version: int | None
    held: list[int]
    nbytes: int
    layout: str | None


class SegmentOwner:
    """The one owner of a segment. A new owner takes up what a dead one left: layout, versions, head.

    Parameters
    ----------
    root
        Folder of the segment; made if needed.
    deadline
        Seconds to wait for an owner that is just ending. (The kernel unmaps a killed process before it drops
        its locks: seconds for 100 GiB.)

    Raises
    ------
    TimeoutError
        Another process owns the folder; the message names it.
    LaminarError
        What the predecessor left is damaged.
    """

    def __init__(self, root: Path, *, deadline: float = 30.0) -> None:
        self.root = root
        self._mutex = threading.Lock()
        self._owner: int | None = hold(root / "owner.lock", EXCLUSIVE, deadline=deadline)
        (root / "users.lock").touch(0o600)
        try:
            self._segment: Segment | None = Segment(root, writable=True)
        except FileNotFoundError:
            self._segment = None
        except LaminarError:
            release(self._owner)
            raise

    @property
    def layout(self) -> Layout | None:
        """The layout prepared, or taken up; None before."""
        return self._segment.layout if self._segment else None

    def prepare(self, layout: Layout, *, slots: int = 3, reset: bool = False) -> None:
        """Take the memory for ``slots`` versions of this layout. Done already: nothing happens.

        Three slots let one version be read, one be the newest and one be filled, so that a slow reader
        holds up nobody.

        Raises
        ------
        LaminarError
            There is another layout here and ``reset`` is not set, or there is not enough memory.
        """
        if not 2 <= slots < 255:
            raise ValueError(f"slots={slots}: expected at least 2, one to read and one to fill")
        with self._mutex:
            if self._segment and self._segment.layout.hash == layout.hash:
                return
            if self._segment and not reset:
                raise LaminarError(
                    f"{self.root} holds layout {self._segment.layout.hash}, asked for {layout.hash}: "
                    "the model changed under a run; start a new one, or reset the relay"
                )
            self._segment = None
            files.clear(self.root)
            files.create(self.root, layout, slots)
            self._segment = Segment(self.root, writable=True)
            for slot in self._segment.slots:
                slot.populate()

    def promote(self, version: int) -> Promoted:
        """Make a staged version the newest that can be read, once every chunk matches its hash.

        The same version again: the same answer, so that a caller who missed it may ask twice.

        Raises
        ------
        LookupError
            It is not staged: never was, or was overtaken by a newer one.
        ValueError
            A newer one is the head already.
        LaminarError
            A chunk does not match, or nothing is prepared. The newest stays what it was, the damaged copy is
            dropped.
        """
        started = time.perf_counter()
        with self._mutex:
            segment = self._prepared()
            if segment.head is not None and version <= segment.head[0]:
                return self._promoted_before(segment, version)
            index, slot, lock = self._pin_staged(segment, version)
            try:
                _verify_staged(slot)
                slot.stamp = (version, PUBLISHED)
                segment.head = (version, index)
                return Promoted(version, slot.digest, time.perf_counter() - started)
            finally:
                release(lock)

    def receive(self, version: int, *, parts: int = 1, deadline: float = 0.5) -> Incoming:
        """Take a slot for a version that comes from another relay.

        Raises
        ------
        ValueError
            A newer one, or this one, can be read already.
        TimeoutError
            No slot came free in ``deadline`` seconds; the message says who pins which.
        LaminarError
            Nothing is prepared.
        """
        with self._mutex:
            segment = self._prepared()
            if segment.head is not None and version <= segment.head[0]:
                raise ValueError(f"version {version} is not newer than {segment.head[0]}, the newest under {self.root}")
            slot, lock = free_slot(segment, version, deadline=deadline)
            return Incoming(version, slot, lock, parts)

    def adopt(self, version: int, shard: Shard) -> Incoming:
        """Go on to receive a version of which a shard of the trainer has staged its part here.

        Raises
        ------
        LookupError
            The part is not staged: never was, or was overtaken by a newer one.
        ValueError
            A newer version, or this one, can be read already.
        LaminarError
            The part is damaged, or nothing is prepared.
        """
        with self._mutex:
            segment = self._prepared()
            if segment.head is not None and version <= segment.head[0]:
                raise ValueError(f"version {version} is not newer than {segment.head[0]}, the newest under {self.root}")
            for slot in segment.slots:
                lock = slot.claim() if slot.stamp == (version, PARTIAL) else None
                if lock is None:
                    continue
                incoming = Incoming(version, slot, lock, shard.parts)
                try:
                    incoming.range(shard.part, shard.start, shard.stop).arrived(shard.stop)
                except Damaged as error:
                    incoming.abandon()
                    what = f"part {shard.part} of version {version} in {slot.path}"
                    raise LaminarError(f"{what} does not match its checksums; publish it again") from error
                return incoming
        raise LookupError(f"part {shard.part} of version {version} is not staged under {self.root}")

    def commit(self, incoming: Incoming, digest: str = "") -> Promoted:
        """Make a received version the newest that can be read: every range is there and proven.

        Raises
        ------
        LaminarError
            Its digest is not the one that its sender said.
        ValueError
            A newer one can be read already.
        """
        started = time.perf_counter()
        assert incoming.whole and incoming.lock is not None, "commit comes after the last chunk, once"
        with self._mutex:
            segment = self._prepared()
            found = incoming.seal(digest)
            if segment.head is not None and incoming.version <= segment.head[0]:
                raise ValueError(f"version {incoming.version} was overtaken by {segment.head[0]}")
            incoming.slot.stamp = (incoming.version, PUBLISHED)
            segment.head = (incoming.version, segment.slots.index(incoming.slot))
            release(incoming.lock)
            incoming.lock = None
            return Promoted(incoming.version, found, time.perf_counter() - started)

    @contextmanager
    def pinned(self, version: int) -> Iterator[Slot]:
        """Keep a version that can be read from being recycled, for as long as it is sent on.

        Raises
        ------
        LookupError
            It is not here (any more).
        """
        slot = self._segment.published().get(version) if self._segment else None
        lock = slot.pin() if slot else None
        if slot is None or lock is None:
            raise LookupError(f"version {version} cannot be read under {self.root}; held: {self.held()}")
        try:
            if slot.stamp != (version, PUBLISHED):
                raise LookupError(f"version {version} under {self.root} was recycled just now")
            yield slot
        finally:
            release(lock)

    def head(self) -> int | None:
        """The newest version that can be read."""
        return self._segment.head[0] if self._segment and self._segment.head else None

    def held(self) -> list[int]:
        """All versions that can be read, newest last."""
        return list(self._segment.published()) if self._segment else []

    def status(self) -> OwnerStatus:
        """What is here now."""
        if self._segment is None:
            return OwnerStatus(None, [], 0, None)
        return OwnerStatus(self.head(), self.held(), self._segment.nbytes, self._segment.layout.hash)

    def close(self) -> None:
        """Remove every file. Readers keep what they have mapped. Idempotent."""
        with self._mutex:
            if self._owner is not None:
                self._segment = None
                files.remove_segments(self.root)
                release(self._owner)
                self._owner = None

    def _prepared(self) -> Segment:
        if self._segment is None:
            raise LaminarError(f"{self.root}: no layout was prepared, so nothing can be published")
        return self._segment

    def _promoted_before(self, segment: Segment, version: int) -> Promoted:
        newest = self.head()
        if version != newest:
            raise ValueError(f"version {version} is not newer than {newest}, the newest under {self.root}")
        return Promoted(version, segment.published()[version].digest, 0.0)

    def _pin_staged(self, segment: Segment, version: int) -> tuple[int, Slot, int]:
        for index, slot in enumerate(segment.slots):
            if not slot.holds(version):
                continue
            lock = slot.pin()
            if lock is None:
                continue  # the trainer's process overwrites it
            if slot.holds(version):
                return index, slot, lock
            release(lock)
        found = [slot.stamp[0] for slot in segment.slots if slot.stamp]
        raise LookupError(f"version {version} is not staged under {self.root}; there are {sorted(found)}")


def _verify_staged(slot: Slot) -> None:
    """Prove a slot whole. Empty it if it is not: the same version staged again must not be taken for it."""
    try:
        slot.verify()
    except LaminarError:
        slot.stamp = None
        raise
