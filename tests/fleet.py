"""A scheduler with emulated replicas in this process, for tests of hand-overs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, Future, Scheduler, Worker

from laminar.experience.reader import Experience
from laminar.rollout.emulation import EMULATED, EmulatedVersions, Emulation
from laminar.rollout.engines.emulated import EmulatedEngine
from laminar.trajectory import Prompt, Sampling, TrajectoryRequest
from laminar.weights.layout import Layout
from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher
from laminar.weights.segment import remove_segments, segment_root
from laminar_dask.environment import FullMarksPlugin
from laminar_dask.handover import Handover
from laminar_dask.repack import RepackPlugin, RepackSettings
from laminar_dask.replica import ReplicaPlugin, ReplicaSettings
from laminar_dask.roles import RolesPlugin
from laminar_dask.table import TablePlugin
from laminar_dask.trajectories import submit

__all__ = ["CAP", "DEADLINE", "Fleet", "check", "until"]

DEADLINE = 40.0
CAP = 16384
SLOTS = 128


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE:.0f} s"
        await asyncio.sleep(0.005)


@dataclass
class Fleet:
    """A scheduler, a data worker and emulated replicas, all in this process but each with its own server."""

    scheduler: Scheduler
    client: Client
    url: str
    run: str
    emulation: Emulation
    replicas: list[Worker] = field(default_factory=list)
    futures: list[Future] = field(default_factory=list)

    @property
    def repack(self) -> RepackPlugin:
        return self.scheduler.plugins["laminar-repack"]

    def plugin(self, number: int) -> ReplicaPlugin:
        return self.replicas[number].plugins["laminar-replica"]

    def handover(self, number: int) -> Handover:
        return self.plugin(number).handover

    def generating(self, number: int) -> int:
        return sum(attempt.phase == "generating" for attempt in self.plugin(number).attempts.values())

    def length(self, request: str) -> int:
        return EmulatedEngine(emulation=self.emulation).workload.length(request, CAP)

    def request(self, group: str, sample: int, count: int, sampling: Sampling | None = None) -> TrajectoryRequest:
        return TrajectoryRequest(
            run=self.run,
            group=group,
            sample=sample,
            group_size=count,
            prompt=Prompt(id=group, text=""),
            prompt_ids=(5, 3, 8, 2, 9) if sampling else (300,),
            sampling=sampling or Sampling(max_new_tokens=CAP),
            environment=EMULATED,
        )

    async def add_replica(self) -> Worker:
        worker = Worker(
            self.scheduler.address,
            host="127.0.0.1",
            dashboard=False,
            nthreads=SLOTS,
            resources={"rollout": SLOTS},
            name=f"rollout-{len(self.replicas)}",
        )
        self.replicas.append(await worker)
        await self.plugin(-1).ready  # the library cannot load two models at once in one process
        return worker

    async def start(
        self, number: int, count: int, *, name: str = "g", sampling: Sampling | None = None
    ) -> list[Future]:
        """Give a replica one group; returns once all of it generates."""
        requests = [self.request(f"{name}{number}", sample, count, sampling) for sample in range(count)]
        futures = submit(self.client, requests, near=self.replicas[number].address)
        self.futures += futures
        before = self.generating(number)
        await until(lambda: self.generating(number) >= before + count, f"{count} trajectories on replica {number}")
        return futures

    async def results(self) -> dict[str, dict[str, Any]]:
        """All of them, whole, once in the table, and each as long as it was always going to be."""
        results = await asyncio.wait_for(self.client.gather(self.futures), DEADLINE)
        found = {result["id"]: result for result in results}
        assert len(found) == len(self.futures)
        rows = Experience(self.url).query("select trajectory_id, response_ids, migrations from experience").to_pylist()
        assert sorted(row["trajectory_id"] for row in rows) == sorted(found)
        for row in rows:
            expected = self.length(row["trajectory_id"])
            assert sum(row["response_ids"]) == found[row["trajectory_id"]]["tokens"] == expected
            assert row["migrations"] == found[row["trajectory_id"]]["migrations"]
        return found


def publish(run: str, model: str) -> SegmentOwner | None:
    """Version 1 on this host, as a trainer and a relay leave it."""
    root = segment_root(run)
    if model == EMULATED:
        EmulatedVersions(root).publish(1)
        return None
    from transformers import AutoModelForCausalLM

    parameters = AutoModelForCausalLM.from_pretrained(model, dtype="float32").named_parameters()
    tensors = {name: parameter.detach() for name, parameter in parameters}
    owner = SegmentOwner(root)
    owner.prepare(Layout.of(tensors))
    publisher = Publisher(root)
    publisher.publish(1, tensors)
    publisher.close()
    owner.promote(1)
    return owner


@asynccontextmanager
async def fleet(
    folder: Path, *, replicas: int = 3, time_scale: float = 40.0, model: str = EMULATED, **options: Any
) -> AsyncIterator[Fleet]:
    run = f"test-{uuid.uuid4().hex[:8]}"
    emulation = Emulation(time_scale=time_scale)
    settings = ReplicaSettings(
        run=run,
        model=model,
        engine=EMULATED if model == EMULATED else "transformers",
        kv_tokens=2_500_000 if model == EMULATED else 8192,
        slots=SLOTS,
        threads=1,
        seed=0,
        trajectory_deadline=300.0,
        emulation=emulation,
    )
    rules = RepackSettings(run=run, cap=CAP, slots=SLOTS, time_scale=time_scale, **{"automatic": False} | options)
    owner = publish(run, model)
    try:
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            data = Worker(scheduler.address, host="127.0.0.1", dashboard=False, nthreads=4, resources={"data": 1})
            async with data, Client(scheduler.address, asynchronous=True) as client:
                made = Fleet(scheduler, client, str(folder), run, emulation)
                plugins: list[Any] = [RolesPlugin(), RepackPlugin(rules), TablePlugin(str(folder))]
                for plugin in [*plugins, ReplicaPlugin(settings), FullMarksPlugin(EMULATED)]:
                    await client.register_plugin(plugin)
                for _ in range(replicas):
                    await made.add_replica()
                try:
                    yield made
                finally:
                    await client.cancel(made.futures, force=True)
                    for worker in made.replicas:
                        await worker.close()
    finally:
        if owner is not None:
            owner.close()
        remove_segments(segment_root(run))


def check(scenario: Callable[[Fleet], Awaitable[None]], folder: Path, **options: Any) -> None:
    async def go() -> None:
        async with fleet(folder, **options) as made:
            await scenario(made)

    asyncio.run(go())
