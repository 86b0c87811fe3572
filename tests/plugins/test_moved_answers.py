"""A real engine's answers do not change by moving."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from laminar.experience.reader import Experience
from laminar.trajectory import Sampling
from tests.fleet import DEADLINE, Fleet, check, until

MODEL = Path(__file__).parents[2] / "flows" / "models" / "running-sums"


@pytest.fixture
def endless_model(tmp_path: Path) -> str:
    """The quickstart's model without a stop token: every answer is as long as it may be."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**values, "eos_token_id": None}))
    return str(copy)


def test_a_greedy_answer_of_a_real_engine_is_the_same_however_often_it_moves(
    tmp_path: Path, endless_model: str
) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=160)

    async def scenario(made: Fleet) -> None:
        for moves in (0, 1, 2, 5):
            [future] = await made.start(0, 1, name=f"moved{moves}-", sampling=greedy)
            for move in range(moves):
                await move_after(made, 160 * (move + 1) // (moves + 1), source=move % 2, target=1 - move % 2)
            result = await asyncio.wait_for(future, DEADLINE)
            assert (result["tokens"], result["migrations"], result["versions"]) == (160, moves, 1)
        rows = Experience(made.url).query("select * from experience order by migrations").to_pylist()
        assert [row["migrations"] for row in rows] == [0, 1, 2, 5]
        for row in rows[1:]:
            assert row["response_ids"] == rows[0]["response_ids"]
            assert row["logprobs"] == pytest.approx(rows[0]["logprobs"], abs=1e-4)
        assert sum(made.plugin(i).inside.tokens for i in range(2)) == 4 * 160

    check(scenario, tmp_path, replicas=2, model=endless_model, time_scale=1.0)


async def move_after(made: Fleet, tokens: int, *, source: int, target: int) -> None:
    """Move the one that runs on ``source`` once it has so many tokens."""

    def enough() -> bool:
        made.plugin(source).inside.collect()
        return any(attempt.tokens >= tokens for attempt in made.plugin(source).attempts.values())

    await until(enough, f"{tokens} tokens")
    await made.client.scheduler.laminar_repack_move(source=f"rollout-{source}", target=f"rollout-{target}")
    await until(lambda: made.generating(target) == 1, "it on the other replica")
