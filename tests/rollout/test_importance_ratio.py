"""At equal weights the importance ratio is 1: the engine's logprobs are those the trainer computes."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from laminar.environments.reasoning_gym import reasoning_gym
from laminar.rollout.engine import Generated, Generation
from laminar.rollout.engines import create_engine
from laminar.rollout.tokens import encode, load_tokenizer
from laminar.trainer.config import GRPO, AdamW
from laminar.trainer.learner import Learner
from laminar.trajectory import Sampling

MODEL = str(Path(__file__).parents[2] / "flows" / "models" / "running-sums")
PROMPTS, SAMPLES = 16, 4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_importance_ratio_at_equal_weights_is_one_for_every_token_of_a_batch(temperature: float) -> None:
    learner = Learner(MODEL, GRPO(), AdamW(), temperature=temperature, seed=0)
    engine = create_engine("transformers", MODEL)
    engine.start()
    try:
        engine.load(0, learner.tensors())
        prompts, answers = _generate(engine, temperature)
    finally:
        engine.close()
    ours = learner.token_logprobs(prompts, [answer.ids for answer in answers])
    ratios = [
        math.exp(mine - theirs)
        for row, answer in zip(ours, answers, strict=True)
        for mine, theirs in zip(row, answer.logprobs, strict=True)
    ]
    assert len(ratios) > 5 * len(answers)
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3


def _generate(engine, temperature: float) -> tuple[list, list[Generated]]:
    environment = reasoning_gym("chain_sum", size=PROMPTS, min_terms=2, max_terms=5, max_digits=2)
    tokenizer = load_tokenizer(MODEL)
    prompts = [encode(tokenizer, environment.prompt(i)) for i in range(PROMPTS) for _ in range(SAMPLES)]
    done: dict[str, Generated] = {}
    complete = threading.Event()

    def finish(generated: Generated) -> None:
        done[generated.id] = generated
        if len(done) == len(prompts):
            complete.set()

    sampling = Sampling(temperature=temperature, max_new_tokens=96)
    for number, ids in enumerate(prompts):
        engine.submit(Generation(f"r{number}", ids, sampling), finish)
    assert complete.wait(120), f"{len(done)} of {len(prompts)} answers came within 120 s"
    return prompts, [done[f"r{number}"] for number in range(len(prompts))]
