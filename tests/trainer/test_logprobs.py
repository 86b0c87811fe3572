"""Logprobs made for some tokens at a time are those of a whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from laminar.trainer.batching import MicroBatch, microbatches
from laminar.trainer.logprobs import Head
from laminar.trainer.rows import samples_of
from tests.trainer.micro import VOCABULARY, rows

AT_ONCE = 7 * VOCABULARY


@pytest.fixture
def batch() -> MicroBatch:
    table = rows()
    [batch] = microbatches(samples_of(table, [1.0] * table.num_rows), 10_000)
    return batch


@pytest.fixture
def model(model_folder: Path):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture
def capped():
    """A model that does something to its logits after the last matrix."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        final_logit_softcapping=1.5,
        initializer_range=0.3,
    )
    return Gemma2ForCausalLM(config).eval()


def written_out(model, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=batch.input_ids).logits[batch.row, batch.position - 1] / temperature
    spread = torch.distributions.Categorical(logits=logits)
    return spread.log_prob(batch.input_ids[batch.row, batch.position]), spread.entropy()


@pytest.mark.parametrize("which", ["model", "capped"])
@pytest.mark.parametrize("at_once", [AT_ONCE, 1 << 26])
def test_logprobs_entropy_and_their_gradient_are_those_written_out(request, batch, which, at_once):
    model = request.getfixturevalue(which)
    outcome = []
    for compute in (
        lambda: written_out(model, batch, 0.7),
        lambda: Head(model, at_once=at_once).token_logprobs(
            batch, temperature=0.7, dtype=torch.float32, entropy_gradient=True
        ),
    ):
        logprobs, entropy = compute()
        model.zero_grad()
        (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.3 * entropy).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        outcome.append((logprobs.detach(), entropy.detach(), gradient))
    for expected, got in zip(*outcome, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_parts_give_what_the_whole_gives(batch, model):
    outcome = []
    for at_once in (AT_ONCE, 1 << 26):
        model.zero_grad()
        logprobs, _ = Head(model, at_once=at_once).token_logprobs(batch, temperature=1.0, dtype=torch.bfloat16)
        logprobs.sum().backward()
        outcome.append((logprobs.detach(), model.lm_head.weight.grad.clone()))
    assert outcome[0][0].dtype == torch.float32
    torch.testing.assert_close(outcome[0][0], outcome[1][0], rtol=1e-2, atol=2e-2)
    assert (outcome[0][1] - outcome[1][1]).norm() / outcome[1][1].norm() < 2e-2


@pytest.mark.parametrize(("which", "plain"), [("model", True), ("capped", False)])
def test_a_model_that_scales_its_logits_makes_them_itself(request, which, plain):
    assert (Head(request.getfixturevalue(which)).matrix is not None) == plain


def test_only_logits_that_are_needed_are_made_and_never_all_of_a_batch(batch, model):
    head, shapes = Head(model, at_once=AT_ONCE), []
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    head.token_logprobs(batch, temperature=1.0, dtype=torch.float32)
    assert max(shapes) == (7, VOCABULARY)
    assert sum(tokens for tokens, _ in shapes) == batch.tokens
