"""The trainer on a real scheduler, with the real experience table and relay, all in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from laminar.errors import LaminarError, RunFailed
from laminar.trainer import checkpoint
from laminar.weights.reader import WeightReader
from laminar.weights.segment import segment_root
from laminar_dask import trainer as module
from laminar_dask.table import TablePlugin
from tests.plugins.trainer_cluster import GROUP, READY, cluster, held, runs, until
from tests.trainer.micro import save_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model"))


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
        await until(lambda: c.newest() == 1, "version 1 announced")
        with WeightReader(segment_root(c.settings.run)).pull() as pulled:
            for name, tensor in actor._learner.tensors().items():
                assert torch.equal(pulled.tensors[name], tensor)
        assert c.lives() == {READY: GROUP, ("trained", 1, 0): 2 * GROUP}


@runs
async def test_waiting_says_what_for(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, _ = await c.started(groups=1)
        report = await trainer.train(2, poll=0.05)
        assert report["status"] == "waiting"
        assert "2 complete groups" in report["why"]


@runs
async def test_status_answers_in_the_middle_of_a_step(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.started(groups=2)
        with held(actor) as go:
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
        first, actor = await c.started(groups=4)
        reports = [await first.train(1, poll=1.0) for _ in range(3)]
        assert [report["checkpoint"] is not None for report in reports] == [False, True, False]
        lease = c.table.lease(1, version=3, staleness_ceiling=None, lessee="trainer")  # and dies in its fourth
        assert lease is not None
        await actor.close()
        second, _ = await c.trainer()
        assert await second.start() == {"step": 2, "version": 4, "resumed": True}
        assert c.newest() == 4
        assert c.lives() == {READY: 2 * GROUP, ("trained", 1, 0): GROUP, ("trained", 2, 1): GROUP}
        assert (await second.train(2, poll=1.0))["version"] == 5
        assert c.lives().keys() == {("trained", 1, 0), ("trained", 2, 1), ("trained", 3, 4)}


@runs
async def test_a_trainer_that_dies_before_its_first_checkpoint_trains_its_rows_again(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        first, actor = await c.started(groups=1)
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
        trainer, actor = await c.started(groups=2)
        with held(actor) as go:
            training = asyncio.ensure_future(trainer.train(2, poll=1.0))
            await until(lambda: actor.state == "training", "training")
            await c.end("data")
            go.set()
            await until(lambda: actor.state != "training", "the step's end")
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
        trainer, actor = await c.started(groups=1)
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
        trainer, _ = await c.started(groups=3)
        await c.end("relay")
        report = await trainer.train(1, poll=1.0)
        assert (report["status"], report["published"]) == ("trained", False)
        await c.begin("relay")
        assert (await trainer.train(1, poll=1.0))["published"]
        await until(lambda: c.newest() == 2, "version 2 announced")
        assert (await trainer.status())["skipped_publications"] == 1


@runs
async def test_a_version_that_was_left_out_is_published_when_the_trainer_waits_for_rows_of_it(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path, staleness_ceiling=0) as c:
        trainer, _ = await c.started(groups=1)
        await c.end("relay")
        assert not (await trainer.train(1, poll=1.0))["published"]
        assert (await trainer.train(1, poll=0.05))["status"] == "waiting"
        await c.begin("relay")
        assert (await trainer.train(1, poll=0.05))["status"] == "waiting"
        await until(lambda: c.newest() == 1, "version 1 announced")


@runs
async def test_the_last_version_is_published_with_the_final_checkpoint_if_it_was_left_out(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, _ = await c.started(groups=1)
        await c.end("relay")
        assert not (await trainer.train(1, poll=1.0))["published"]
        saving = asyncio.ensure_future(trainer.save(final=True))
        await c.begin("relay")
        await saving
        await until(lambda: c.newest() == 1, "version 1 announced")


@runs
async def test_a_version_lost_before_a_new_relay_took_it_up_is_published_anew(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.started(groups=1)

        async def busy(version: int) -> None:
            raise LaminarError("not now")

        c.workers["relay"].handlers["laminar_relay_published"] = busy
        assert (await trainer.train(1, poll=1.0))["published"]
        await until(lambda: actor._publication.failed_announcements > 0, "an announcement in vain")
        await c.end("relay")
        await c.begin("relay")
        await until(lambda: actor._publication.left_out == 1, "the loss is noticed")
        await trainer.train(1, poll=0.05)
        await until(lambda: c.newest() == 1, "version 1 announced")


@runs
async def test_a_version_whose_number_cannot_be_written_down_is_left_out_and_training_goes_on(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, _ = await c.started(groups=2)
        with patch.object(checkpoint, "write_version", side_effect=OSError(28, "No space left on device")):
            report = await trainer.train(1, poll=1.0)
        assert (report["status"], report["published"]) == ("trained", False)
        assert c.lives() == {READY: GROUP, ("trained", 1, 0): GROUP}
        assert (await trainer.train(1, poll=1.0))["published"]


@runs
async def test_a_checkpoint_waits_for_a_store_that_comes_back(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path, checkpoint_every=1) as c:
        trainer, _ = await c.started(groups=1)
        write = checkpoint.write
        refusals = iter([OSError(28, "No space left on device"), OSError(5, "Input/output error")])

        def refuse(*arguments: Any, **named: Any) -> None:
            if (error := next(refusals, None)) is not None:
                raise error
            write(*arguments, **named)

        with patch.object(checkpoint, "write", refuse):
            report = await trainer.train(1, poll=1.0)
        assert checkpoint.read(report["checkpoint"]).step == 1


@runs
async def test_a_store_that_does_not_come_back_ends_the_run_with_what_to_do(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path, checkpoint_every=1) as c:
        trainer, _ = await c.started(groups=1)
        full = OSError(28, "No space left on device")
        with patch.object(checkpoint, "write", side_effect=full), patch.object(module, "SAVE_DEADLINE", 0.3):
            with pytest.raises(RunFailed, match=r"no checkpoint of step 1 could be written .* No space left .* resume"):
                await trainer.train(1, poll=1.0)
        assert c.lives() == {("trained", 1, 0): GROUP}


@runs
async def test_a_version_is_announced_again_until_the_relay_has_taken_it_up(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.started(groups=1)

        async def damaged(version: int) -> None:
            raise LaminarError(f"version {version} is damaged")

        handlers = c.workers["relay"].handlers
        published, handlers["laminar_relay_published"] = handlers["laminar_relay_published"], damaged
        assert (await trainer.train(1, poll=1.0))["published"]
        await until(lambda: actor._publication.failed_announcements > 0, "an announcement in vain")
        handlers["laminar_relay_published"] = published
        await until(lambda: c.newest() == 1, "version 1 announced")


@runs
async def test_the_final_checkpoint_is_the_policy_that_was_published_last(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.started(groups=1)
        await trainer.train(1, poll=1.0)
        url = await trainer.save(final=True)
        assert url == f"{tmp_path}/checkpoints/final"
        assert checkpoint.read(url) == checkpoint.Checkpoint(url, 1, 1, {"run": c.settings.run})
        loaded = AutoModelForCausalLM.from_pretrained(url).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in actor._learner.tensors().items())


@runs
async def test_divergence_reaches_the_caller_as_one_line(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as c:
        trainer, actor = await c.started(groups=3)
        actor._learner.model.model.norm.weight.data.fill_(float("nan"))
        await trainer.train(1, poll=1.0), await trainer.train(1, poll=1.0)
        with pytest.raises(RunFailed, match="3 updates in a row"):
            await trainer.train(1, poll=1.0)
