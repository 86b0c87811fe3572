"""How far a range of a buffer is filled: a receiver advances it, senders follow it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Prefix"]


class Prefix:
    """Bytes ``start`` to ``have`` of a flat buffer are there; ``stop`` is where the range ends.

    Senders wait for sockets and for this at once, so each gets an event descriptor that becomes readable when
    more has come.
    """

    def __init__(self, start: int, stop: int, have: int | None = None) -> None:
        self.start = start
        self.stop = stop
        self._have = start if have is None else have
        self._mutex = threading.Lock()
        self._wakers: set[int] = set()

    @property
    def have(self) -> int:
        """The byte after the last one that is there."""
        return self._have

    @property
    def whole(self) -> bool:
        """Whether all of the range is there."""
        return self._have >= self.stop

    def move(self, have: int) -> None:
        """Say how far the range is filled now: further, or (after damage) less far."""
        with self._mutex:
            self._have = have
            for waker in self._wakers:
                os.eventfd_write(waker, 1)

    @contextmanager
    def watch(self) -> Iterator[int]:
        """A descriptor that becomes readable with each ``move``. Read it (``os.eventfd_read``) before looking."""
        waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._mutex:
            self._wakers.add(waker)
        try:
            yield waker
        finally:
            with self._mutex:
                self._wakers.remove(waker)
            os.close(waker)
