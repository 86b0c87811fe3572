"""A real scheduler with the real experience table and relay, for tests of the trainer: all in one process."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, Scheduler, Worker

from laminar.experience.reader import Experience
from laminar.experience.schema import record_batch, row
from laminar.trainer.config import GRPO, AdamW
from laminar.weights.reader import WeightReader
from laminar.weights.segment import segment_root
from laminar_dask.relay import RelayPlugin
from laminar_dask.roles import RolesPlugin
from laminar_dask.table import TablePlugin
from laminar_dask.trainer import Trainer, TrainerSettings
from tests.trainer.micro import VOCABULARY

__all__ = ["GROUP", "READY", "Cluster", "cluster", "held", "runs", "until"]

GROUP = 4
READY = ("ready", None, None)


class Cluster:
    """A scheduler, a client, and one worker a role; workers can be ended and started anew."""

    def __init__(self, scheduler: Scheduler, client: Client, settings: TrainerSettings) -> None:
        self.scheduler, self.client, self.settings = scheduler, client, settings
        self.workers: dict[str, Worker] = {}

    async def begin(self, role: str) -> None:
        self.workers[role] = await Worker(
            self.scheduler.address, resources={role: 1}, nthreads=1, host="127.0.0.1", dashboard=False
        )

    async def end(self, role: str) -> None:
        await self.workers.pop(role).close()

    async def trainer(self) -> tuple[Any, Trainer]:
        """A new actor, not yet started: its handle, and the object itself."""
        key = f"trainer-{uuid.uuid4().hex}"
        handle = await self.client.submit(Trainer, self.settings, actor=True, resources={"trainer": 1}, key=key)
        return handle, self.workers["trainer"].state.actors[key]

    async def started(self, *, groups: int = 0) -> tuple[Any, Trainer]:
        """The same, started, and with rows to train on."""
        handle, actor = await self.trainer()
        await handle.start()
        self.append(groups)
        return handle, actor

    def newest(self) -> int | None:
        """Newest version that replicas can read."""
        return WeightReader(segment_root(self.settings.run)).newest()

    @property
    def table(self) -> Any:
        return self.workers["data"].plugins[TablePlugin.name].table

    def lives(self) -> Counter[tuple[str, int | None, int | None]]:
        """How many rows are in which state, trained by which step, which updated which version."""
        found = Experience(self.settings.run_url).query("select state, trained_step, trained_version from experience")
        return Counter(tuple(row.values()) for row in found.to_pylist())

    def append(self, groups: int, *, start: int = 0, version: int = 0) -> None:
        random = np.random.default_rng(start)
        rows = []
        for group in range(start, start + groups):
            for sample in range(GROUP):
                ids = random.integers(2, VOCABULARY, random.integers(3, 20)).tolist()
                values = {
                    "trajectory_id": f"g{group}-{sample}",
                    "group_id": f"g{group}",
                    "prompt_id": f"p{group}",
                    "sample": sample,
                    "group_size": GROUP,
                    "weight_version": version,
                    "finish_version": version,
                    "prompt_ids": [group % VOCABULARY, 3],
                    "response_ids": ids,
                    "logprobs": [-4.5] * len(ids),
                    "reward": float(sample),
                    "finish_reason": "stop",
                }
                rows.append(row(**values))
        self.table.append(record_batch(rows))


@asynccontextmanager
async def cluster(
    model: Path, run_url: Path, roles: tuple[str, ...] = ("data", "relay", "trainer"), **settings: Any
) -> AsyncIterator[Cluster]:
    run = f"test-{uuid.uuid4().hex[:8]}"
    values = {"algorithm": GRPO(group_size=GROUP), "optimizer": AdamW(lr=1e-3, warmup_steps=0), **settings}
    chosen = TrainerSettings(run=run, run_url=str(run_url), model=str(model), **values)
    async with (
        Scheduler(host="127.0.0.1", dashboard_address="127.0.0.1:0", port=0) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        made = Cluster(scheduler, client, chosen)
        for plugin in (RolesPlugin(), TablePlugin(str(run_url)), RelayPlugin(run)):
            await client.register_plugin(plugin)
        for role in roles:
            await made.begin(role)
        try:
            yield made
        finally:
            for actor in made.workers["trainer"].state.actors.values() if "trainer" in made.workers else ():
                await actor.close()
            for role in list(made.workers):
                await made.end(role)
    assert not segment_root(run).exists()


def runs(test: Callable[..., Awaitable[None]], *, within: float = 60.0) -> Callable[..., None]:
    """Run an asynchronous test with a deadline in seconds."""

    def run(model_folder: Path, tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(model_folder, tmp_path), within))

    run.__name__ = test.__name__
    return run


@contextmanager
def held(actor: Trainer) -> Iterator[threading.Event]:
    """The trainer's next step waits in its thread until the event is set."""
    go, step = threading.Event(), actor._learner.step

    def wait_and_step(*rows: Any, **named: Any) -> Any:
        assert go.wait(20), "nobody let the step go on"
        return step(*rows, **named)

    actor._learner.step = wait_and_step  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        actor._learner.step = step  # type: ignore[method-assign]


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 10 s: {what}")
