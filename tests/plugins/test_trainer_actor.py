"""The trainer on a real scheduler, with the real experience table and relay, all in one process."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Scheduler, Worker

from laminar.errors import LaminarError, RunFailed
from laminar.experience.reader import Experience
from laminar.experience.schema import record_batch, row
from laminar.trainer import checkpoint
from laminar.trainer.config import GRPO, AdamW
from laminar.weights.reader import WeightReader
from laminar.weights.segment import segment_root
from laminar_dask.relay import RelayPlugin
from laminar_dask.roles import RolesPlugin
from laminar_dask.table import TablePlugin
from laminar_dask.trainer import Trainer, TrainerSettings
from tests.trainer.micro import VOCABULARY, save_model

GROUP = 4
READY = ("ready", None, None)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model"))


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
async def cluster(model: Path, run_url: Path, **settings: Any) -> AsyncIterator[Cluster]:
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
        for role in ("data", "relay", "trainer"):
            await made.begin(role)
        try:
            yield made
        finally:
            for actor in made.workers["trainer"].state.actors.values():
                await actor.close()
            for role in list(made.workers):
                await made.end(role)
    assert not segment_root(run).exists()


def runs(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test with a deadline."""

    def run(model_folder: Path, tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(model_folder, tmp_path), 60))

    run.__name__ = test.__name__
    return run


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 10 s: {what}")


@runs
async def test_a_step_leases_trains_publishes_and_commits(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        assert await trainer.start() == {"step": 0, "version": 0, "resumed": False}
        assert await trainer.start() == {"step": 0, "version": 0, "resumed": False}
        with WeightReader(segment_root(c.settings.run)).pull() as pulled:
            assert pulled.version == 0
        c.append(3)
        report = await trainer.train(2, poll=1.0)
        assert (report["status"], report["step"], report["version"], report["rows"]) == ("trained", 1, 1, 2 * GROUP)
        assert report["seconds"] >= report["train_seconds"] > 0 < report["publish_seconds"]
        assert report["wait_seconds"] > 0
        await until(lambda: WeightReader(segment_root(c.settings.run)).newest() == 1, "version 1 announced")
        with WeightReader(segment_root(c.settings.run)).pull() as pulled:
            for name, tensor in actor._learner.tensors().items():
                assert torch.equal(pulled.tensors[name], tensor)
        assert c.lives() == {READY: GROUP, ("trained", 1, 0): 2 * GROUP}


@runs
async def test_waiting_says_what_for(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, _ = await c.trainer()
        await trainer.start()
        c.append(1)
        report = await trainer.train(2, poll=0.05)
        assert report["status"] == "waiting"
        assert "2 complete groups" in report["why"]


@runs
async def test_status_answers_in_the_middle_of_a_step(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        await trainer.start()
        c.append(2)
        go, step = threading.Event(), actor._learner.step
        actor._learner.step = lambda *rows, **named: go.wait(20) and step(*rows, **named)
        training = asyncio.ensure_future(trainer.train(2, poll=1.0))
        await until(lambda: actor.state == "training", "training")
        assert (await trainer.status())["state"] == "training"
        go.set()
        assert (await training)["step"] == 1


@runs
async def test_a_restarted_trainer_goes_on_from_its_checkpoint_and_trains_nothing_twice(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path, checkpoint_every=2) as c:
        first, actor = await c.trainer()
        await first.start()
        c.append(4)
        reports = [await first.train(1, poll=1.0) for _ in range(3)]
        assert [report["checkpoint"] is not None for report in reports] == [False, True, False]
        lease = c.table.lease(1, version=3, staleness_ceiling=None, lessee="trainer")  # and dies in its fourth
        assert lease is not None
        await actor.close()
        second, _ = await c.trainer()
        assert await second.start() == {"step": 2, "version": 4, "resumed": True}
        assert WeightReader(segment_root(c.settings.run)).newest() == 4
        assert c.lives() == {READY: 2 * GROUP, ("trained", 1, 0): GROUP, ("trained", 2, 1): GROUP}
        assert (await second.train(2, poll=1.0))["version"] == 5
        assert c.lives().keys() == {("trained", 1, 0), ("trained", 2, 1), ("trained", 3, 4)}


@runs
async def test_a_trainer_that_dies_before_its_first_checkpoint_trains_its_rows_again(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        first, actor = await c.trainer()
        await first.start()
        c.append(1)
        await first.train(1, poll=1.0)
        await actor.close()
        second, _ = await c.trainer()
        assert await second.start() == {"step": 0, "version": 2, "resumed": False}
        assert (await second.train(1, poll=1.0))["staleness_max"] == 2


@runs
async def test_versions_grow_also_when_the_whole_cluster_is_new(model_folder: Path, tmp_path: Path) -> None:
    for expected in (0, 2):
        async with cluster(model_folder, tmp_path) as c:
            trainer, _ = await c.trainer()
            assert (await trainer.start())["version"] == expected
            c.append(1, start=expected)
            await trainer.train(1, poll=1.0)


@runs
async def test_a_step_is_committed_also_when_the_data_worker_was_restarted_meanwhile(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        await trainer.start()
        c.append(2)
        go, step = threading.Event(), actor._learner.step
        actor._learner.step = lambda *rows, **named: go.wait(20) and step(*rows, **named)
        training = asyncio.ensure_future(trainer.train(2, poll=1.0))
        await until(lambda: actor.state == "training", "training")
        await c.end("data")
        go.set()
        await until(lambda: actor.state == "committing", "committing")
        assert c.lives() == {READY: 2 * GROUP}
        await c.begin("data")
        assert (await training)["step"] == 1
        assert c.lives() == {("trained", 1, 0): 2 * GROUP}


@runs
async def test_a_step_is_not_taken_as_committed_by_a_data_worker_whose_table_did_not_open(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        await trainer.start()
        c.append(1)
        await c.end("data")
        await c.client.unregister_worker_plugin(TablePlugin.name)
        await c.begin("data")
        actor._uncommitted = {"lease": "trainer-1", "step": 1, "version": 0, "groups": ["g0"]}
        with pytest.raises(RunFailed, match="could not open the experience table"):
            await trainer.train(1, poll=1.0)
        actor._uncommitted = None


@runs
async def test_training_goes_on_without_a_relay_and_a_new_one_gets_the_next_version(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, _ = await c.trainer()
        await trainer.start()
        c.append(3)
        await c.end("relay")
        report = await trainer.train(1, poll=1.0)
        assert (report["status"], report["published"]) == ("trained", False)
        await c.begin("relay")
        assert (await trainer.train(1, poll=1.0))["published"]
        await until(lambda: WeightReader(segment_root(c.settings.run)).newest() == 2, "version 2 announced")
        assert (await trainer.status())["skipped_publications"] == 1


@runs
async def test_a_version_is_announced_again_until_the_relay_has_taken_it_up(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        await trainer.start()
        c.append(1)

        async def damaged(version: int) -> None:
            raise LaminarError(f"version {version} is damaged")

        handlers = c.workers["relay"].handlers
        published, handlers["laminar_relay_published"] = handlers["laminar_relay_published"], damaged
        assert (await trainer.train(1, poll=1.0))["published"]
        await until(lambda: actor.failed_announcements > 0, "an announcement in vain")
        handlers["laminar_relay_published"] = published
        await until(lambda: WeightReader(segment_root(c.settings.run)).newest() == 1, "version 1 announced")


@runs
async def test_the_final_checkpoint_is_the_policy_that_was_published_last(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        await trainer.start()
        c.append(1)
        await trainer.train(1, poll=1.0)
        url = await trainer.save(final=True)
        assert url == f"{tmp_path}/checkpoints/final"
        assert checkpoint.read(url) == checkpoint.Checkpoint(url, 1, 1, {"run": c.settings.run})
        loaded = AutoModelForCausalLM.from_pretrained(url).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in actor._learner.tensors().items())


@runs
async def test_divergence_reaches_the_caller_as_one_line(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.trainer()
        await trainer.start()
        actor._learner.model.model.norm.weight.data.fill_(float("nan"))
        c.append(3)
        await trainer.train(1, poll=1.0), await trainer.train(1, poll=1.0)
        with pytest.raises(RunFailed, match="3 updates in a row"):
            await trainer.train(1, poll=1.0)
