"""Brings a lost actor back under the same key; its ``start`` reloads the last checkpoint."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Future, Scheduler, SchedulerPlugin, Worker
from distributed.comm import CommClosedError

from laminar.errors import RunFailed
from laminar_dask._compat import in_background
from laminar_dask.roles import SCHEDULER_DEADLINE
from laminar_dask.waiting import within

__all__ = ["ActorHandle", "ActorRestarted", "ActorSupervisor"]


WATCH_SECONDS = 0.2
MAX_RESTARTS = 10
WINDOW_SECONDS = 3600.0
"""An actor that dies more than ``MAX_RESTARTS`` times in so long is given up: something is wrong with it. Now and
then a machine goes, and a long run must not end by that."""
LOST = ("Worker holding Actor was lost", "Unable to contact Actor's worker")
"""How Dask's errors about a lost actor begin."""


class ActorSupervisor(SchedulerPlugin):
    """Scheduler half: re-runs the constructor of an actor whose worker died (Dask itself gives it up)."""

    name = "laminar-supervisor"
    idempotent = True

    def __init__(self) -> None:
        self.restarts: dict[Any, int] = {}
        self.died: dict[Any, list[float]] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Keep the scheduler."""
        self.scheduler = scheduler
        scheduler.handlers["laminar_actor_restarts"] = self.count

    def count(self, key: Any) -> dict[str, Any]:
        """``restarts``: how often an actor died, and ``given_up``: whether it stays dead."""
        return {"restarts": self.restarts.get(key, 0), "given_up": len(self.died.get(key, ())) > MAX_RESTARTS}

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        """An actor that erred while it lived (not in its constructor) has lost its worker: retry it."""
        if finish != "erred" or start == "processing":
            return
        task = self.scheduler.tasks.get(key)
        if task is None or not task.actor:
            return
        now = time.monotonic()
        self.restarts[key] = self.restarts.get(key, 0) + 1
        self.died[key] = [at for at in self.died.get(key, ()) if now - at < WINDOW_SECONDS] + [now]
        if len(self.died[key]) > MAX_RESTARTS:
            return

        async def retry() -> None:
            task = self.scheduler.tasks.get(key)
            if task is not None and task.state == "erred":
                self.scheduler.log_event("laminar", {"action": "actor-restart", "key": str(key)})
                self.scheduler.stimulus_retry(keys=[key])

        in_background(self.scheduler, retry)


class ActorRestarted(Exception):
    """The actor's process died during a call; the actor lives again, without what it held in memory."""


class ActorHandle:
    """Calls an actor that may die in the middle of a call, and notices when it did.

    A call to a dying actor can hang for ever, so the supervisor's count of restarts is watched beside it.
    """

    def __init__(self, future: Future, worker: Worker, *, name: str) -> None:
        self.future = future
        self.worker = worker
        self.name = name
        self.restarts = 0

    async def synchronise(self) -> None:
        """Count restarts from now on: what an earlier handle has seen is no news."""
        self.restarts = (await self._seen())["restarts"]

    async def call(self, method: str, *args: Any, within: float, **kwargs: Any) -> Any:
        """Call ``method`` with at most ``within`` seconds.

        Raises
        ------
        ActorRestarted
            The actor was lost since the last call or during this one, and is being brought back: the caller
            decides what to repeat.
        RunFailed
            No answer in time.
        """
        call = asyncio.ensure_future(self._call(method, args, kwargs))
        end = time.monotonic() + within
        try:
            while not call.done() and time.monotonic() < end:
                await asyncio.wait({call}, timeout=WATCH_SECONDS)
                await self._raise_if_restarted()
            if not call.done():
                raise RunFailed(f"the {self.name} did not answer `{method}` within {within:.0f} s")
            return call.result()
        except (OSError, RuntimeError) as error:
            if not _is_loss(error):
                raise
            await asyncio.sleep(WATCH_SECONDS)
            raise ActorRestarted(f"the {self.name} was lost: {error}") from error
        finally:
            call.cancel()

    async def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        actor = await self.future.result()
        return await getattr(actor, method)(*args, **kwargs)

    async def _raise_if_restarted(self) -> None:
        seen = await self._seen()
        if seen["restarts"] != self.restarts:
            self.restarts = seen["restarts"]
            if seen["given_up"]:
                raise RunFailed(
                    f"the {self.name} died {MAX_RESTARTS + 1} times within {WINDOW_SECONDS / 60:.0f} minutes; it is "
                    "not started again: see the log of its worker, then resume the run"
                )
            raise ActorRestarted(f"the {self.name} was lost and is brought back (restart {self.restarts})")

    async def _seen(self) -> dict[str, Any]:
        """What the supervisor has seen of it."""
        try:
            answer: Any = await within(
                SCHEDULER_DEADLINE, self.worker.scheduler.laminar_actor_restarts(key=self.future.key)
            )
        except TimeoutError as error:
            raise RunFailed(
                f"the scheduler did not answer for {SCHEDULER_DEADLINE:.0f} s; is it overloaded?"
            ) from error
        return dict(answer)


def _is_loss(error: BaseException) -> bool:
    """Whether it is Dask's word of a lost actor, and not an error of the actor's own."""
    return isinstance(error, CommClosedError) or str(error).startswith(LOST)
