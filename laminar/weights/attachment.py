"""A process's lasting hold on a segment that another process owns: the trainer's and the replicas' side."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from laminar.weights.locks import POLL, SHARED, holders, named, release, try_lock
from laminar.weights.mapping import Segment

__all__ = ["Attachment"]

DEADLINE = 5.0
"""Seconds to wait for a sweep that looks at the folder just now; it takes microseconds."""


class Attachment:
    """Maps the files at ``root`` once, and again when others stand there. Holds ``users.lock`` meanwhile,
    so that a sweep sees that the run lives."""

    def __init__(self, root: Path, *, writable: bool) -> None:
        self.root = root
        self._writable = writable
        self._mutex = threading.Lock()
        self._segment: Segment | None = None
        self._users: int | None = None

    @property
    def mapped(self) -> Segment | None:
        """What was mapped last, whether it still stands or not."""
        return self._segment

    def segment(self) -> Segment:
        """The segment that stands at ``root`` now. ``FileNotFoundError`` if there is none."""
        segment = self._segment
        if segment is not None and segment.stands():
            return segment
        with self._mutex:
            self._drop()
            self._users = _attach(self.root / "users.lock")
            self._segment = Segment(self.root, writable=self._writable)
            return self._segment

    def close(self) -> None:
        """Let go. Memory stays mapped as long as somebody uses a view of it. Idempotent."""
        with self._mutex:
            self._drop()

    def _drop(self) -> None:
        self._segment = None
        if self._users is not None:
            release(self._users)
            self._users = None


def _attach(path: Path) -> int:
    until = time.monotonic() + DEADLINE
    while (fd := try_lock(path, SHARED)) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was held for {DEADLINE:g} s by {named(holders(path))}")
        time.sleep(POLL)
    return fd
