"""A whole step of GRPO against one written out by the papers, row by row and token by token, in plain Python.

Advantages: DeepSeekMath (arXiv 2402.03300), 4.1. Clipping: PPO (1707.06347), eq. 7, with DAPO's higher upper bound
(2503.14476), 3.1. Mean over the tokens of an update: DAPO, 3.3. Weights min(pi_old / pi_engine, C): truncated
importance sampling, as in verl (``rollout_is="token"``) and TRL (``vllm_importance_sampling_correction``).
"""

from __future__ import annotations

import copy
import statistics

import numpy as np
import pytest
import torch

from laminar.trainer.config import GRPO, AdamW
from laminar.trainer.learner import Learner
from tests.trainer.micro import rows

TEMPERATURE = 0.8
ALGORITHM = GRPO(minibatches=3, importance_cap=1.2, entropy_coefficient=0.01)
OPTIMIZER = AdamW(lr=2e-2, warmup_steps=4, max_grad_norm=0.2, weight_decay=0.1, betas=(0.8, 0.95))


def logprobs_of(model, row) -> torch.Tensor:
    """All logprobs at the places of the response's tokens, ``[tokens, vocabulary]``."""
    prompt = len(row["prompt_ids"])
    logits = model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0, prompt - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def advantage_of(row, table) -> float:
    rewards = [other["reward"] for other in table if other["group_id"] == row["group_id"]]
    return (row["reward"] - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + 1e-6)


def written_out(model, optimizer, table, order) -> dict[str, float]:
    """Train ``model`` in place; the figures that the report has."""
    with torch.no_grad():
        proximal = [logprobs_of(model, row) for row in table]
    ratios, clipped, norms = [], 0, []
    for part in np.array_split(order, ALGORITHM.minibatches):
        tokens = sum(len(table[i]["response_ids"]) for i in part)
        loss = torch.zeros(())
        for i in part:
            row, advantage, new = table[i], advantage_of(table[i], table), logprobs_of(model, table[i])
            for position, token in enumerate(row["response_ids"]):
                old = proximal[i][position, token]
                ratio = (new[position, token] - old).exp()
                weight = (old - row["logprobs"][position]).exp()
                ratios.append(weight.item())
                bounded = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.28))
                objective = min(ratio * advantage, bounded * advantage)
                clipped += int(bounded * advantage < ratio * advantage)
                loss = loss - min(weight, torch.tensor(1.2)) * objective / tokens
                loss = loss + 0.01 * (new[position].exp() * new[position]).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = sum(float((p.grad**2).sum()) for p in model.parameters()) ** 0.5
        norms.append(norm)
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.2 / norm)
        optimizer.step()
    return {
        "grad_norm": statistics.fmean(norms),
        "clip_fraction": clipped / len(ratios),
        "truncated_fraction": sum(ratio > 1.2 for ratio in ratios) / len(ratios),
        "importance_ratio_mean": statistics.fmean(ratios),
        "importance_ratio_max": max(ratios),
    }


def test_two_steps_of_several_updates_are_those_written_out(model_folder):
    learner = Learner(model_folder, ALGORITHM, OPTIMIZER, temperature=TEMPERATURE, seed=5)
    model = copy.deepcopy(learner.model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        fused=False,
    )
    generator = torch.Generator().manual_seed(5)
    for step in (1, 2):
        table = rows((4, 3, 2), seed=step)
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 * step / 4
        order = torch.randperm(table.num_rows, generator=generator).tolist()
        expected = written_out(model, optimizer, table.to_pylist(), order)
        report = learner.step(table, version=3)
        for name, value in expected.items():
            assert getattr(report, name) == pytest.approx(value, rel=1e-3), (step, name)
        assert 0 < expected["clip_fraction"] < 1 and 0 < expected["truncated_fraction"] < 1
        assert expected["grad_norm"] > 0.2
    for (name, got), wanted in zip(learner.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, msg=name)
