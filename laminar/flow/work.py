"""What runs on a worker: tasks, whose results are kept in the run store, and stages.

Every node tells the run's watchers when it starts and how it ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distributed import get_worker

from laminar.flow import kept
from laminar.flow.context import RunContext
from laminar.flow.holes import fill
from laminar.watch.events import Level, topic

__all__ = ["first", "run_stage", "run_task"]


def run_task(
    label: str,
    function: Callable[..., Any],
    identity: kept.Identity,
    context: RunContext,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *results: Any,
) -> Any:
    """A task's node: an earlier run's result where it is kept, otherwise the function's, kept for later."""
    args, kwargs = fill(inputs, results)
    key = kept.result_key(identity, args, kwargs)
    try:
        found = kept.read(context.store, key)
    except kept.Unreadable as error:
        found = None
        _say(context, f"{label}: {error}; computing it again", level="warning")
    if found is not None:
        _say(context, f"{label}: kept result of run {found.run_id}")
        _tell(context, label, "kept")
        return found.result
    with _announced(context, label):
        result = function(*args, **kwargs)
    try:
        kept.write(context.store, key, kept.Kept(context.run_id, result))
    except kept.Unwritable as error:
        _say(context, f"{label}: its result is not kept: {error}", level="warning")
    return result


async def run_stage(
    label: str,
    function: Callable[..., Awaitable[Any]],
    spec: Any,
    context: RunContext,
    inputs: dict[str, Any],
    *results: Any,
) -> Any:
    """A stage's node."""
    with _announced(context, label):
        return await function(spec, context, **fill(inputs, results))


def first(inputs: tuple[Any, list[Any]], *results: Any) -> Any:
    """What the flow's function returned, once every node's result is known."""
    return fill(inputs[0], results)


@contextmanager
def _announced(context: RunContext, label: str) -> Iterator[None]:
    _tell(context, label, "running")
    try:
        yield
    except BaseException:
        _tell(context, label, "failed")
        raise
    _tell(context, label, "done")


def _tell(context: RunContext, label: str, state: str) -> None:
    get_worker().log_event(topic(context.run_id), {"type": "stage", "name": label, "state": state})


def _say(context: RunContext, text: str, *, level: Level = "info") -> None:
    get_worker().log_event(topic(context.run_id), {"type": "message", "text": text, "level": level})
