"""Ctrl-C: once asks a run to stop, twice ends it at once. A terminal that hangs up asks, too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "not_for_children"]


_COUNTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered, in the main thread; in any other it counts none.

    The first one only sets ``requested``, for the loop that waits to see. The second one raises
    ``KeyboardInterrupt`` wherever the program is, unless ``deaf`` is set: an orderly end must not be cut. SIGHUP
    never does that: a terminal that is closed sends several, and whoever closed it wants no haste. Under ``nohup``
    it is not counted.
    """

    def __init__(self) -> None:
        self.requested = False
        self.deaf = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _COUNTED:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and not self.deaf and number != signal.SIGHUP:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def not_for_children() -> Iterator[None]:
    """Processes started within never see Ctrl-C or a hang-up, nor do those that threads started within start later.

    A terminal sends them to every process of the foreground. The workers must outlive it to drain, so the signals are
    blocked here: threads and processes inherit that. For this thread they are held back until the end.
    """
    resource_tracker.ensure_running()  # it would lift the block when the first process is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
