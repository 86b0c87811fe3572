"""Moves that somebody asks for: ``laminar-flow repack`` and ``laminar-flow drain``. Scheduler half."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from laminar.errors import LaminarError
from laminar.repack import Rules, spread
from laminar.rollout.latency import StepCurve
from laminar_dask._compat import workers_of
from laminar_dask.roles import RolesPlugin

if TYPE_CHECKING:
    from laminar_dask.repack import RepackPlugin

__all__ = ["TRAJECTORIES", "ByHand"]

TRAJECTORIES = ("rollout-", "evaluate-")
"""How the keys of trajectory tasks begin."""
DRAIN_DEADLINE = 300.0
POLL_SECONDS = 0.05


class ByHand:
    """Empties replicas, whether that pays or not."""

    def __init__(self, plugin: RepackPlugin, scheduler: Scheduler) -> None:
        self.plugin = plugin
        self.scheduler = scheduler
        scheduler.handlers["laminar_repack_move"] = self.move
        scheduler.handlers["laminar_drain"] = self.drain

    async def move(self, source: str, target: str | None = None) -> dict[str, Any]:
        """RPC: move everything that runs on ``source`` to ``target``, or spread it. Names or addresses."""
        to = None if target is None else self._address(target)
        return {"status": "OK", "moved": await self._empty(self._address(source), to)}

    async def drain(self, worker: str) -> dict[str, Any]:
        """RPC: move everything away from a worker, wait until nothing runs there, retire it."""
        address, began = self._address(worker), time.monotonic()
        if not set(workers_of(self.scheduler, "rollout")) - self._withheld - {address}:
            raise LaminarError(f"{worker} is the only replica; start another one before it is drained")
        self._withheld.add(address)
        moved = 0
        while tasks := self._tasks(address):
            if time.monotonic() - began > DRAIN_DEADLINE:
                self._withheld.discard(address)
                raise LaminarError(f"{worker} still runs {len(tasks)} trajectories after {DRAIN_DEADLINE:.0f} s")
            if not self.plugin.moves.busy(address):
                moved += await self._empty(address, None)
            await asyncio.sleep(POLL_SECONDS)
        self._roles.drained.add(self.plugin.worker_name(address))
        await self.scheduler.retire_workers(workers=[address], close_workers=True, remove=True)
        self._withheld.discard(address)
        self.plugin.event({"action": "drained", "source": worker, "trajectories": moved})
        return {"status": "OK", "moved": moved, "seconds": time.monotonic() - began}

    async def _empty(self, source: str, target: str | None) -> int:
        """Ask for hand-overs of all that runs there or has not begun; how many."""
        looks = await self.plugin.looks.take(detail=True)
        if source not in looks:
            return 0
        loads = self.plugin.looks.loads(looks)
        runs = {row[0]: row[1] for row in looks[source]["trajectories"]}
        waiting = {task.key: task.run_id for task in self._tasks(source) if task.key not in runs}
        others = [load for a, load in loads.items() if a not in self._withheld and a != source and target in (None, a)]
        if not others:
            raise LaminarError("there is no other replica to move to")
        unknown = Rules(StepCurve(((1.0, 1.0),)), self.plugin.settings.cap, batch_bound=self.plugin.settings.slots)
        chosen = spread(loads[source], others, self.plugin.looks.rules(looks) or unknown)
        keys = {target: list(of_one) for target, of_one in chosen.items()}
        keys.setdefault(min(others, key=lambda load: load.count).name, []).extend(waiting)
        runs |= waiting
        bulks = [
            self.plugin.moves.begin(source, address, [(key, runs[key]) for key in of_one], "by hand")
            for address, of_one in keys.items()
        ]
        return sum(len(bulk.left) for bulk in bulks if bulk is not None)

    @property
    def _roles(self) -> RolesPlugin:
        roles: RolesPlugin = self.scheduler.plugins[RolesPlugin.name]
        return roles

    @property
    def _withheld(self) -> set[str]:
        return self._roles.withheld

    def _tasks(self, address: str) -> list[Any]:
        state = self.scheduler.workers.get(address)
        tasks = [] if state is None else state.processing
        return [task for task in tasks if str(task.key).startswith(TRAJECTORIES)]

    def _address(self, worker: str) -> str:
        addresses = workers_of(self.scheduler, "rollout")
        for address in addresses:
            if worker in (address, self.plugin.worker_name(address)):
                return address
        names = sorted(self.plugin.worker_name(address) for address in addresses)
        raise LaminarError(f"no replica is called {worker!r}; there are {', '.join(names)}")
