"""Every private Dask name that we touch, in one place. Written against distributed 2026.8."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Scheduler, Worker

__all__ = [
    "add_metric",
    "has_role",
    "in_background",
    "is_cancelled",
    "is_queued",
    "remove_metric",
    "run_id_of",
    "workers_of",
]


def has_role(worker: Worker, role: str) -> bool:
    """Whether a worker was started with the resource ``role``."""
    return role in worker.state.total_resources


def workers_of(scheduler: Scheduler, role: str) -> list[str]:
    """Addresses of the workers that offer the resource ``role`` and can still be talked to."""
    return [ws.address for ws in scheduler.workers.values() if role in ws.resources and ws.status.name == "running"]


def add_metric(worker: Worker, name: str, metric: Callable[[Worker], Any]) -> None:
    """Have each heartbeat carry ``metric(worker)``.

    The dictionary is replaced, not changed: a heartbeat walks through it and waits in between, and one that finds it
    changed ends the worker, for good.
    """
    worker.metrics = {**worker.metrics, name: metric}


def remove_metric(worker: Worker, name: str) -> None:
    """The inverse of ``add_metric``; fine if there is none."""
    worker.metrics = {other: metric for other, metric in worker.metrics.items() if other != name}


def run_id_of(worker: Worker, key: str) -> int:
    """Dask's fencing token of the attempt that runs now; -1 if the worker no longer knows the key.

    Never cache it: cancel and resubmit on one worker revives the old attempt under a new token.
    """
    task = worker.state.tasks.get(key)
    return -1 if task is None else int(task.run_id)


def is_cancelled(worker: Worker, key: str) -> bool:
    """Whether nobody wants the result of a running task any more. Dask does not stop coroutines by itself."""
    task = worker.state.tasks.get(key)
    return task is None or task.state in ("cancelled", "released", "forgotten")


def is_queued(worker: Worker, key: str) -> bool:
    """Whether a task was given to the worker and not begun."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state in ("waiting", "ready", "constrained")


def in_background(scheduler: Scheduler, function: Callable[[], Awaitable[Any]]) -> None:
    """Run a coroutine on the scheduler's loop outside of the state machine that is now in a transition."""
    scheduler._ongoing_background_tasks.call_soon(function)
