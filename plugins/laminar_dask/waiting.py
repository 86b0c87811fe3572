"""Waiting with a deadline, and ending tasks for sure.

Before Python 3.12 ``asyncio.wait_for`` forgets a cancellation that comes in the moment in which what it waits for is
done: the task goes on as if nobody had ended it. We wait by ``within``; a library's code below us may still use the
other, so that tasks are ended by ``end``, which asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

__all__ = ["end", "within"]

T = TypeVar("T")

log = logging.getLogger(__name__)

ASK_AGAIN = 5.0
"""Seconds between two requests to end."""
END_DEADLINE = 60.0

_ending: set[asyncio.Task[Any]] = set()
"""Tasks that are inside ``end``."""


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of ``awaitable``, or ``TimeoutError`` after so many seconds."""
    async with asyncio.timeout(seconds):
        return await awaitable


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all are done; what they raised is theirs.

    A task that is ending tasks of its own is not asked again meanwhile. What is not done after ``END_DEADLINE`` is
    named in the log and left behind: whoever ends something has a result or an error of its own to give.
    """
    left = set(tasks)
    loop = asyncio.get_running_loop()
    until = loop.time() + END_DEADLINE
    me = asyncio.current_task()
    assert me is not None, "called from a task"
    _ending.add(me)
    try:
        while left and loop.time() < until:
            for task in left - _ending:
                task.cancel()
            done, left = await asyncio.wait(left, timeout=ASK_AGAIN)
            for task in done:
                if not task.cancelled():
                    task.exception()
    finally:
        _ending.discard(me)
    for task in left:
        log.error("%s did not end within %.0f s and is left behind", task, END_DEADLINE)
