"""What runs on a worker: tasks, whose results are kept in the run store, and stages.

Every node tells the run's watchers when it starts and how it ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distributed import get_worker

from laminar.errors import RunFailed
from laminar.flow import kept
from laminar.flow.context import RunContext
from laminar.flow.holes import fill
from laminar.flow.store import RunFolder
from laminar.watch.events import Level, topic

__all__ = ["first", "run_stage", "run_task"]

MOST_STARTS = 3
"""How often a task is tried whose process ends under it. Stages are not counted: they go on where they were."""


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
    with _announced(context, label), _counted(context, label, key):
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
    except (SystemExit, KeyboardInterrupt) as error:  # Dask would end the worker, start it anew and try again
        _tell(context, label, "failed")
        raise RuntimeError(f"it ended with {type(error).__name__}({error}); expected a result or an error") from error
    except BaseException:
        _tell(context, label, "failed")
        raise
    _tell(context, label, "done")


@contextmanager
def _counted(context: RunContext, label: str, key: str) -> Iterator[None]:
    """Fail where the process ended under a task too often: Dask would try again as often as workers may die.

    The count is kept in the run's folder, since nothing else outlives such a process.
    """
    folder, file = RunFolder(context.url), f"logs/started/{key}.json"
    here = get_worker().scheduler.address  # another one: the run was resumed since
    before = folder.read_json(file) or {}
    times = int(before["times"]) if before.get("scheduler") == here else 0
    if times >= MOST_STARTS:
        raise RunFailed(f"{label} was started {times} times and each time its process ended: it crashed, or was killed")
    folder.write_json(file, {"scheduler": here, "times": times + 1})
    try:
        yield
    finally:
        folder.write_json(file, {"scheduler": here, "times": 0})


def _tell(context: RunContext, label: str, state: str) -> None:
    get_worker().log_event(topic(context.run_id), {"type": "stage", "name": label, "state": state})


def _say(context: RunContext, text: str, *, level: Level = "info") -> None:
    get_worker().log_event(topic(context.run_id), {"type": "message", "text": text, "level": level})
