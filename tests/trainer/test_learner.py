from __future__ import annotations

import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch

from laminar.errors import RunFailed
from laminar.trainer.learner import Learner
from tests.trainer.micro import rows


def gradient_of(learner: Learner, table: pa.Table) -> torch.Tensor:
    """Gradient of one global batch, before clipping, in one vector; the weights stay as they are."""
    learner._optimizer.step = lambda: None
    learner.config = learner.config.model_copy(update={"max_grad_norm": 1e9})
    learner.step(table, version=3)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters()]).double()


def assert_same_gradient(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize(("budget", "count"), [(10_000, 1), (380, 2), (130, 4)])
def test_gradient_is_the_same_for_one_two_and_four_micro_batches(make_learner, budget, count):
    table = rows()
    learner = make_learner(budget=budget)
    assert make_learner(budget=budget).step(table, version=3).microbatches == count
    alone = make_learner(budget=1)
    assert_same_gradient(gradient_of(learner, table), gradient_of(alone, table))


def test_gradient_is_the_same_for_shuffled_rows(make_learner):
    table = rows()
    order = np.random.default_rng(1).permutation(table.num_rows)
    expected = gradient_of(make_learner(), table)
    assert_same_gradient(gradient_of(make_learner(budget=300), table.take(order)), expected)


def test_gradient_is_that_of_the_mean_over_all_tokens_written_out(make_learner):
    table = rows()
    learner = make_learner(importance_cap=None, scale_advantages="none")
    got = gradient_of(learner, table)
    model, total = learner.model, 0.0
    for row in table.to_pylist():
        group = [other["reward"] for other in table.to_pylist() if other["group_id"] == row["group_id"]]
        advantage = row["reward"] - np.mean(group)
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        log_probs = model(ids).logits[0].log_softmax(-1)
        start = len(row["prompt_ids"])
        for position, token in enumerate(row["response_ids"], start):
            total = total - advantage * log_probs[position - 1, token]
    model.zero_grad()
    (total / sum(map(len, table["response_ids"].to_pylist()))).backward()
    assert_same_gradient(torch.cat([p.grad.flatten() for p in model.parameters()]).double(), got)


def test_metrics_do_not_depend_on_padding(make_learner):
    table = rows()
    alone, padded = make_learner(budget=1).step(table, version=3), make_learner().step(table, version=3)
    for name, value in alone.as_dict().items():
        if name not in ("seconds", "microbatches"):
            assert value == pytest.approx(getattr(padded, name), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_importance_ratio_is_one_at_equal_weights(make_learner, temperature):
    learner = make_learner(temperature=temperature)
    report = learner.step(rows(learner=learner), version=3)
    assert report.importance_ratio_max == pytest.approx(1, abs=1e-4)
    assert report.importance_ratio_mean == pytest.approx(1, abs=1e-5)
    assert report.kl == pytest.approx(0, abs=1e-6)
    assert report.truncated_fraction == report.clip_fraction == 0


def test_logprobs_are_those_of_the_model_at_the_temperature_whatever_the_batches(make_learner):
    learner = make_learner(budget=60)
    table = rows()
    prompts, responses = table["prompt_ids"].to_pylist(), [*table["response_ids"].to_pylist()[:-1], []]
    got = learner.token_logprobs(prompts, responses, temperature=0.7)
    for prompt, response, logprobs in zip(prompts, responses, got, strict=True):
        logits = learner.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 :] / 0.7
        expected = [logits[i].log_softmax(-1)[token].item() for i, token in enumerate(response)]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_mini_batches_update_several_times_against_the_policy_of_the_start(make_learner):
    learner = make_learner(minibatches=4, lr=5e-2)
    report = learner.step(rows((4, 4, 4), learner=learner), version=3)
    assert report.importance_ratio_max == pytest.approx(1, abs=1e-4)
    assert report.clip_fraction > 0


def test_the_better_answers_become_likelier(make_learner):
    learner = make_learner(lr=3e-3)
    table = rows((4, 4), learner=learner)
    ids = (table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist())
    before = [np.mean(row) for row in learner.token_logprobs(*ids)]
    for _ in range(5):
        learner.step(table, version=3)
    gain = np.array([np.mean(row) for row in learner.token_logprobs(*ids)]) - before
    rewards = table["reward"].to_numpy()
    for group in (slice(0, 4), slice(4, 8)):
        assert gain[group][rewards[group].argmax()] > gain[group][rewards[group].argmin()]


def test_a_group_of_equal_rewards_changes_nothing_and_is_counted(make_learner):
    learner = make_learner()
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    table = rows((3,))
    table = table.set_column(table.column_names.index("reward"), "reward", pa.array([1.0] * 3, pa.float32()))
    report = learner.step(table, version=3)
    assert (report.groups_without_signal, report.grad_norm) == (1, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.tensors().items())


def test_an_update_that_is_not_finite_is_left_out_and_the_third_in_a_row_ends_the_run(make_learner):
    learner = make_learner()
    table = rows()
    poison = pa.array([[float("nan")] * len(r) for r in table["logprobs"].to_pylist()], pa.list_(pa.float32()))
    bad = table.set_column(table.column_names.index("logprobs"), "logprobs", poison)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    assert [learner.step(bad, version=3).skipped_updates for _ in range(2)] == [1, 1]
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.tensors().items())
    assert learner.step(table, version=3).skipped_updates == 0
    learner.step(bad, version=3), learner.step(bad, version=3)
    with pytest.raises(RunFailed, match="3 updates in a row were not finite"):
        learner.step(bad, version=3)


def test_staleness_is_reported_and_its_ceiling_is_hard(make_learner):
    learner = make_learner()
    report = learner.step(rows((4,), version=3), version=4, staleness_ceiling=2)
    assert (report.staleness_mean, report.staleness_max) == (1.5, 2)
    with pytest.raises(ValueError, match="ceiling of 1"):
        learner.step(rows((4,), version=3), version=4, staleness_ceiling=1)
    with pytest.raises(ValueError, match="weight version 3 cannot train version 2"):
        learner.step(rows((4,), version=3), version=2)


def test_rows_without_a_reward_are_refused(make_learner):
    table = rows((2,))
    table = table.set_column(table.column_names.index("reward"), "reward", pa.array([1.0, None], pa.float32()))
    with pytest.raises(ValueError, match="1 of 2 rows have no reward"):
        make_learner().step(table, version=3)


def test_entropy_bonus_raises_entropy(make_learner):
    plain, bonus = make_learner(lr=3e-3), make_learner(lr=3e-3, entropy_coefficient=0.5)
    table = rows(learner=plain)
    for _ in range(4):
        last = plain.step(table, version=3), bonus.step(table, version=3)
    assert last[1].entropy > last[0].entropy


def test_tied_weights_are_published_once_and_in_the_served_type(model_folder, make_learner):
    tensors = make_learner().tensors()
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert not any(tensor.requires_grad for tensor in tensors.values())
    reference = make_learner()
    learner = Learner(model_folder, reference.algorithm, reference.config, temperature=1.0, seed=0, dtype="bfloat16")
    assert {tensor.dtype for tensor in learner.tensors().values()} == {torch.bfloat16}


def test_publishing_in_another_type_keeps_no_second_model(model_folder, make_learner):
    """SkyRL #1623, verl #2995: out of memory exactly at the weight sync."""
    reference = make_learner()
    learner = Learner(model_folder, reference.algorithm, reference.config, temperature=1.0, seed=0, dtype="bfloat16")
    served = learner.tensors()
    alive = [weakref.ref(served[name]) for name in served]
    assert [ref() for ref in alive] == [None] * len(served)
    name = "model.embed_tokens.weight"
    assert reference.tensors()[name].data_ptr() == reference.model.model.embed_tokens.weight.data_ptr()


def test_updates_smaller_than_bfloat16_can_hold_are_not_lost(model_folder, make_learner):
    reference = make_learner(lr=1e-6)
    learner = Learner(model_folder, reference.algorithm, reference.config, temperature=1.0, seed=0, dtype="bfloat16")
    before = learner.model.model.norm.weight.detach().clone()
    learner.step(rows(), version=3)
    assert not torch.equal(before, learner.model.model.norm.weight)


def test_more_mini_batches_than_rows_are_as_many_updates_as_there_are_rows(make_learner):
    learner = make_learner(minibatches=8)
    updates = []
    learner._optimizer.register_step_post_hook(lambda *_: updates.append(1))
    assert learner.step(rows((3,)), version=3).rows == 3
    assert len(updates) == 3


def test_rows_of_which_no_token_counts_are_refused(make_learner):
    table = rows((2,))
    masks = pa.array([[0] * len(ids) for ids in table["response_ids"].to_pylist()], pa.list_(pa.int8()))
    with pytest.raises(ValueError, match="none of 2 rows has a token that counts"):
        make_learner().step(table.set_column(table.column_names.index("loss_mask"), "loss_mask", masks), version=3)


def test_a_step_without_rows_is_refused(make_learner):
    with pytest.raises(ValueError, match="given no rows"):
        make_learner().step(rows((2,)).slice(0, 0), version=3)


def test_an_empty_answer_counts_for_its_group_and_has_no_loss(make_learner):
    table = rows((3,))
    cut = table.to_pylist()
    for name in ("response_ids", "logprobs", "loss_mask"):
        cut[1][name] = []
    report = make_learner().step(pa.Table.from_pylist(cut, schema=table.schema), version=3)
    assert report.rows == 3
    assert report.tokens == len(cut[0]["response_ids"]) + len(cut[2]["response_ids"])
    assert report.reward_mean == pytest.approx(np.mean(table["reward"].to_numpy()))


def test_the_share_of_answers_that_were_cut_is_what_the_engine_said_and_not_guessed_from_lengths(make_learner):
    """verl #7817, #7823: a truncation rate against the padded width, or the wrong cap."""
    table = rows((4,))
    reasons = pa.array(["length", "stop", "stop", "length"])
    table = table.set_column(table.column_names.index("finish_reason"), "finish_reason", reasons)
    assert make_learner().step(table, version=3).cut_fraction == 0.5
    assert make_learner(budget=1).step(table.slice(1, 3), version=3).cut_fraction == pytest.approx(1 / 3)
