"""Ctrl-C: once asks a run to stop, twice ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "not_for_children"]


class Interrupts:
    """Counts SIGINT and SIGTERM while it is entered, in the main thread; in any other it counts none.

    The first one only sets ``requested``, for the loop that waits to see. The second one raises
    ``KeyboardInterrupt`` wherever the program is, unless ``deaf`` is set: an orderly end must not be cut.
    """

    def __init__(self) -> None:
        self.requested = False
        self.deaf = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested and not self.deaf:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def not_for_children() -> Iterator[None]:
    """Processes started within never see Ctrl-C, nor do those that threads started within start later.

    A terminal sends it to every process of the foreground. The workers must outlive it to drain, so the signal is
    blocked here: threads and processes inherit that. For this thread it is held back until the end.
    """
    resource_tracker.ensure_running()  # it would lift the block when the first process is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
