from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.trainer.config import GRPO
from laminar.trainer.losses import Totals, importance_weights, token_losses

logs = st.floats(-6, -0.01)
tokens = st.lists(st.tuples(logs, logs, logs, st.floats(-3, 3)), min_size=1, max_size=30)


def columns(values):
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*values, strict=True)]


def reference(logprob, proximal, behaviour, advantage, config):
    """The objective of one token, written out."""
    ratio = math.exp(logprob - proximal)
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    weight = 1.0 if config.importance_cap is None else min(math.exp(proximal - behaviour), config.importance_cap)
    return -weight * min(ratio * advantage, clipped * advantage)


@given(tokens, st.sampled_from([None, 1.0, 2.0]))
def test_each_token_has_the_loss_written_on_paper(values, cap):
    config = GRPO(importance_cap=cap)
    expected = torch.tensor([reference(*value, config) for value in values], dtype=torch.float64)
    torch.testing.assert_close(token_losses(*columns(values), config), expected)


def test_a_token_clipped_high_or_low_has_no_gradient():
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    zero = torch.zeros(4)
    token_losses(logprobs, zero, zero, torch.tensor([1.0, -1.0, 1.0, -1.0]), GRPO()).sum().backward()
    assert [gradient != 0 for gradient in logprobs.grad.tolist()] == [False, True, True, False]


def test_neither_the_proximal_policy_nor_the_weight_carries_a_gradient():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    token_losses(logprobs, logprobs, torch.tensor([-1.5]), torch.tensor([2.0]), GRPO()).backward()
    assert logprobs.grad.item() == pytest.approx(-2.0 * math.exp(0.5))


def test_importance_weights_are_capped_also_where_the_engine_found_the_token_impossible():
    behaviour = torch.tensor([-1.0, -5.0, -200.0])
    assert importance_weights(torch.full((3,), -1.0), behaviour, 2.0).tolist() == [1.0, 2.0, 2.0]


@given(tokens, st.integers(1, 29))
def test_figures_do_not_depend_on_the_split_into_micro_batches(values, cut):
    config = GRPO()
    logprob, proximal, behaviour, advantage = columns(values)
    losses = token_losses(logprob, proximal, behaviour, advantage, config)
    everything = (losses, -logprob, logprob, proximal, behaviour, advantage)
    total = Totals()
    for part in (slice(0, cut), slice(cut, None)):
        if losses[part].numel():
            total.add(Totals.of(*(column[part] for column in everything), config))
    whole = Totals.of(*everything, config)
    for name in ("loss", "entropy", "kl", "ratio", "clipped", "truncated"):
        assert total.mean(name) == pytest.approx(whole.mean(name), rel=1e-9, abs=1e-12)
    assert total.ratio_max == whole.ratio_max
    assert whole.kl >= 0
