"""Kill -9 of the trainer's process at each moment of a step: nothing is trained twice, nothing is left out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Nanny

from laminar.trainer import checkpoint
from laminar_dask.supervisor import ActorHandle, ActorSupervisor
from laminar_dask.trainer_link import TrainerLink
from tests.plugins.dying_trainer import MOMENTS, DyingTrainer
from tests.plugins.trainer_cluster import GROUP, cluster, until
from tests.trainer.micro import save_model

STEPS = 6


@pytest.mark.timeout(400)
def test_a_trainer_killed_at_each_moment_in_turn_trains_every_row_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    asyncio.run(asyncio.wait_for(_die_and_train(save_model(tmp_path / "model"), tmp_path), 360))


async def _die_and_train(model: Path, folder: Path) -> None:
    left, run = folder / "moments", folder / "run"
    left.write_text("\n".join(MOMENTS))
    said: list[str] = []
    versions = [-1]

    def say(text: str, **level: Any) -> None:
        said.append(text)

    async with cluster(model, run, ("data", "relay"), checkpoint_every=2) as c:
        await c.client.register_plugin(ActorSupervisor())
        async with Nanny(c.scheduler.address, resources={"trainer": 1}, nthreads=1, host="127.0.0.1"):
            future = c.client.submit(DyingTrainer, c.settings, left, actor=True, resources={"trainer": 1}, key="dying")
            handle = ActorHandle(future, c.workers["data"], name="trainer")
            await handle.synchronise()
            link = TrainerLink(handle, say)
            await link.start()
            c.append(STEPS)
            while link.step < STEPS:
                assert link.version > versions[-1], "versions grow, also over deaths"
                versions.append(link.version)
                await link.train(1, poll=2.0)
            final = await link.save()
            assert checkpoint.read(final).step == STEPS
            await until(lambda: c.newest() == link.version, "the last version")
            future.release()
        assert left.read_text() == "", "every moment came"
        assert handle.restarts == len(MOMENTS) == len([text for text in said if "brought back" in text])
        lives = c.lives()
        assert {life[:2]: count for life, count in lives.items()} == {
            ("trained", step): GROUP for step in range(1, STEPS + 1)
        }
        trained = sorted((step, version) for _, step, version in lives)
        assert [version for _, version in trained] == sorted(version for _, version in trained)
