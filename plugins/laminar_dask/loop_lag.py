"""How long an event loop does not serve what waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["LoopLag"]

TICK = 0.002
"""Seconds between two looks."""


class LoopLag:
    """Measures while there is something to be measured: from ``start`` until ``going`` says no.

    What it finds is the longest time between two turns, whoever used it: callbacks of the loop, other threads of the
    process, other processes on the machine.
    """

    def __init__(self, going: Callable[[], bool]) -> None:
        self.going = going
        self.longest = 0.0
        """Seconds."""
        self.longest_own = 0.0
        """Seconds of it in which this process's loop itself computed; for the rest others had the processor."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Measure from now on."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._measure())

    async def _measure(self) -> None:
        while True:
            before, own = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK)
            lag = time.perf_counter() - before - TICK
            if lag > self.longest:
                self.longest, self.longest_own = lag, time.thread_time() - own
            if not self.going():
                return
