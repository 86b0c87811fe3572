"""One measurement of ``bench repack``: emulated replicas are fed and looked at for a while, under one rule."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from laminar.experience.reader import Experience
from laminar.rollout.emulation import EMULATED, PROMPT_TOKENS, EmulatedVersions, Emulation
from laminar.trajectory import Prompt, Sampling, TrajectoryRequest
from laminar.weights.segment import segment_root

__all__ = ["CAP", "KV_TOKENS", "MODES", "Arm", "Bench", "measure_arm"]

KV_TOKENS = 850_000
CAP = 16384
GROUP = 16
SAMPLING = Sampling(max_new_tokens=CAP)
MODES: dict[str, dict[str, Any]] = {
    "without": {"automatic": False},
    "with": {},
    "careless": {"margin": 0.0, "pause": 0.0},
}
"""How an arm repacks: settings of the plugin that differ from the defaults."""


@dataclass(frozen=True)
class Bench:
    """Sizes of a measurement. Seconds are emulated ones."""

    replicas: int = 8
    slots: int = 512
    time_scale: float = 20.0
    version_seconds: float = 300.0
    warm_seconds: float = 400.0
    seconds: float = 900.0
    tool_calls: int = 0
    seed: int = 0

    @property
    def emulation(self) -> Emulation:
        """Of every replica."""
        return Emulation(time_scale=self.time_scale, tool_calls=self.tool_calls, seed=self.seed)


@dataclass(frozen=True)
class Arm:
    """One measurement: with which rule and batch. ``id`` begins the names of its groups."""

    id: str
    mode: str
    batch: int


async def measure_arm(bench: Bench, arm: Arm, run: str, folder: str) -> dict[str, Any]:
    """From empty replicas to empty replicas. A task for the data worker: as a run's conductor, it shares no
    process with the scheduler."""
    from distributed import Client, get_worker

    worker = get_worker()
    async with Client(worker.scheduler.address, asynchronous=True, set_as_default=False) as client:
        addresses: Any = await worker.scheduler.laminar_workers(role="rollout")
        with client.as_current():
            return await _Driver(bench, run, folder, client, list(addresses)).measure(arm)


class _Driver:
    """Feeds the replicas and looks at their engines."""

    def __init__(self, bench: Bench, run: str, folder: str, client: Any, addresses: list[str]) -> None:
        self.bench, self.run, self.folder, self.client = bench, run, folder, client
        self.addresses = addresses
        self.versions = EmulatedVersions(segment_root(run))
        self.version = self.versions.newest() or 0
        self.serial = 0
        self.freed: dict[str, asyncio.Event] = {}
        self.futures: set[Any] = set()

    async def measure(self, arm: Arm) -> dict[str, Any]:
        """One arm, from empty replicas to empty replicas."""
        from laminar_dask.repack import RepackPlugin, RepackSettings, freed_topic

        bench = self.bench
        self.client.subscribe_topic(freed_topic(self.run), self._on_freed)
        settings = RepackSettings(
            run=self.run, cap=CAP, slots=bench.slots, time_scale=bench.time_scale, **MODES[arm.mode]
        )
        await self.client.register_plugin(RepackPlugin(settings))
        async with self._going(arm):
            await asyncio.sleep(bench.warm_seconds / bench.time_scale)
            began, before = time.time(), await self._look()
            await asyncio.sleep(bench.seconds / bench.time_scale)
            after, ended = await self._look(), time.time()
            status = await self.client.scheduler.laminar_repack_status()
        seconds = sum(after[a]["seconds"] - before[a]["seconds"] for a in after) / len(after)
        gained = {name: sum(after[a][name] - before[a][name] for a in after) for name in after[self.addresses[0]]}
        staleness = await asyncio.to_thread(self._staleness, arm, began, ended)
        reviewed = status["releases_reviewed"]
        return {
            "tokens_per_second": gained["decoded"] / seconds,
            "kv_utilisation": gained["kv_seconds"] / gained["seconds"] / KV_TOKENS,
            "preemptions": gained["preemptions"],
            "prefilled_per_decoded": gained["prefilled"] / gained["decoded"],
            "not_paying_fraction": status["releases_not_paying"] / reviewed if reviewed else 0.0,
            **staleness,
            **{name: status[name] for name in _KEPT},
            "handover_emulated_seconds_median": (status["handover_ms_median"] or 0.0) / 1000 * bench.time_scale,
        }

    @contextlib.asynccontextmanager
    async def _going(self, arm: Arm) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._feed(arm, number)) for number in range(len(self.addresses))]
        tasks.append(asyncio.create_task(self._publish()))
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()  # it only ends by an error
        finally:
            from laminar_dask.trajectories import cancel
            from laminar_dask.waiting import end, within

            await end(tasks)
            await cancel(self.client, list(self.futures))
            self.futures.clear()
            await within(120, self._until_empty())

    async def _feed(self, arm: Arm, number: int) -> None:
        """New groups for a replica whenever it has nothing left to do."""
        from distributed import wait

        from laminar_dask.trajectories import submit

        bench, address = self.bench, self.addresses[number]
        freed = self.freed.setdefault(address, asyncio.Event())
        await asyncio.sleep(number / bench.replicas * bench.version_seconds / bench.time_scale)  # not all in step
        while True:
            freed.clear()
            requests = self._requests(arm)
            futures = submit(self.client, requests, near=address)
            self.futures.update(futures)
            done = asyncio.ensure_future(wait(futures))
            done.add_done_callback(functools.partial(self._forget, futures))
            emptied = asyncio.ensure_future(freed.wait())
            try:
                await asyncio.wait({done, emptied}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                emptied.cancel()
            if failed := [future for future in futures if future.status == "error"]:
                await failed[0]

    def _forget(self, futures: list[Any], done: asyncio.Future[Any]) -> None:
        self.futures.difference_update(futures)
        if not done.cancelled():
            done.exception()  # at the end of an arm they are cancelled

    def _requests(self, arm: Arm) -> list[TrajectoryRequest]:
        requests = []
        for _ in range(arm.batch // GROUP):
            group = f"{arm.id}g{self.serial:06d}"
            self.serial += 1
            first = TrajectoryRequest(
                run=self.run,
                group=group,
                sample=0,
                group_size=GROUP,
                prompt=Prompt(id=group, text=""),
                prompt_ids=(PROMPT_TOKENS,),
                sampling=SAMPLING,
                environment=EMULATED,
                queued_at=time.time(),
            )
            requests += [replace(first, sample=sample) for sample in range(GROUP)]
        return requests

    async def _publish(self) -> None:
        """The trainer: a new version every so often."""
        while True:
            await asyncio.sleep(self.bench.version_seconds / self.bench.time_scale)
            self.version += 1
            self.versions.publish(self.version)
            await self.client.scheduler.laminar_repack_published(version=self.version)

    def _on_freed(self, event: tuple[float, dict[str, Any]]) -> None:
        self.freed.setdefault(event[1]["worker"], asyncio.Event()).set()

    async def _look(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = await self.client.run(measures, workers=self.addresses)
        return found

    async def _until_empty(self) -> None:
        while any(look["running"] for look in (await self._look()).values()):
            await asyncio.sleep(0.1)

    def _staleness(self, arm: Arm, began: float, ended: float) -> dict[str, Any]:
        found = Experience(self.folder).query(
            "select avg(finish_version - weight_version) as staleness, count(*) as trajectories, "
            "avg(migrations) as migrations_mean, max(migrations) as migrations_max from experience "
            f"where group_id like '{arm.id}g%' and finished_at between {began} and {ended}"
        )
        return dict(found.to_pylist()[0])


_KEPT = (
    "moves",
    "trajectories_moved",
    "replicas_freed",
    "releases_reviewed",
    "gain_expected",
    "gain_measured",
    "handover_ms_median",
    "placed_ms_median",
    "plan_ms_max",
    "block_ms_max",
    "block_own_ms_max",
    "batch_bound",
)


def measures(dask_worker: Any) -> dict[str, Any]:
    """What the engine of a replica has done. Runs on its worker."""
    plugin = dask_worker.plugins["laminar-replica"]
    return {**plugin.serving.engine.measures(), "running": len(plugin.attempts) + len(plugin.inside.running)}
