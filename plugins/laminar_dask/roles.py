"""Who is who in the cluster: workers found by role, never by a fixed address."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Scheduler, SchedulerPlugin, Worker

from laminar.errors import LaminarError
from laminar_dask._compat import workers_of
from laminar_dask.waiting import within

__all__ = ["SCHEDULER_DEADLINE", "RolesPlugin", "peer", "peers"]

SCHEDULER_DEADLINE = 60.0
"""Seconds for the scheduler to answer: it has a thousand times less to do."""


class RolesPlugin(SchedulerPlugin):
    """Scheduler half: answers which workers have a role, and which stage the plugins were set up for."""

    name = "laminar-roles"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers."""
        self.scheduler = scheduler
        self.stages: set[str] = set()
        self.withheld: set[str] = set()
        """Workers that get no new work: they are being drained."""
        self.drained: set[str] = set()
        """Names of workers that were: nobody starts them again."""
        scheduler.handlers["laminar_workers"] = self.workers
        scheduler.handlers["laminar_enter_stage"] = self.enter_stage

    def workers(self, role: str) -> list[str]:
        """Addresses of the running workers with a role."""
        return [address for address in workers_of(self.scheduler, role) if address not in self.withheld]

    def enter_stage(self, stage: str) -> bool:
        """Whether a stage is entered for the first time; False tells a conductor that it is a restarted one."""
        first = stage not in self.stages
        self.stages.add(stage)
        return first


async def peers(worker: Worker, role: str) -> list[str]:
    """Addresses of all workers with a role, asked of the scheduler. ``LaminarError`` if that does not answer."""
    try:
        found: Any = await within(SCHEDULER_DEADLINE, worker.scheduler.laminar_workers(role=role))
    except TimeoutError as error:
        raise LaminarError(
            f"the scheduler did not say within {SCHEDULER_DEADLINE:.0f} s who has the role `{role}`; "
            "is its process alive and its machine not overloaded?"
        ) from error
    return list(found)


async def peer(worker: Worker, role: str, *, deadline: float = 30.0) -> str:
    """Address of the worker with a role; waits up to ``deadline`` seconds for one to (re)appear."""
    end = time.monotonic() + deadline
    while True:
        found = await peers(worker, role)
        if found:
            return found[0]
        if time.monotonic() > end:
            raise LaminarError(
                f"no worker with the role `{role}` for {deadline:.0f} s; expected one: is its process alive?"
            )
        await asyncio.sleep(0.05)
