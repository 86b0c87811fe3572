"""Waiting with a deadline, and ending tasks for sure.

Before Python 3.12 ``asyncio.wait_for`` forgets a cancellation that comes in the moment in which what it waits for is
done: the task goes on as if nobody had ended it. We wait by ``within``; a library's code below us may still use the
other, so that tasks are ended by ``end``, which asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

__all__ = ["end", "within"]

T = TypeVar("T")

ASK_AGAIN = 5.0
"""Seconds between two requests to end."""
END_DEADLINE = 60.0


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of ``awaitable``, or ``TimeoutError`` after so many seconds."""
    async with asyncio.timeout(seconds):
        return await awaitable


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all are done; what they raised is theirs. ``TimeoutError`` after ``END_DEADLINE``."""
    left = set(tasks)
    loop = asyncio.get_running_loop()
    until = loop.time() + END_DEADLINE
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=ASK_AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()
        if left and loop.time() > until:
            raise TimeoutError(f"{', '.join(map(str, left))} did not end within {END_DEADLINE:.0f} s")
