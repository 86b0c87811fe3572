from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.trainer.advantages import group_advantages

batches = st.lists(st.tuples(st.floats(-10, 10, width=32), st.sampled_from("abcde")), min_size=1, max_size=40)


def test_groups_of_uneven_size_are_normalised_each_by_itself():
    rewards = [0.0, 1.0, 2.0, 3.0, 10.0, 10.0, 40.0, 5.0]
    got = group_advantages(rewards, list("aaaabbbc"))
    np.testing.assert_allclose(got[:4], np.array([-1.5, -0.5, 0.5, 1.5]) / np.std([0, 1, 2, 3]), rtol=1e-5)
    np.testing.assert_allclose(got[4:7], np.array([-10, -10, 20]) / np.std([10, 10, 40]), rtol=1e-5)
    assert got[7] == 0


def test_interleaved_groups_are_told_apart_by_id():
    np.testing.assert_array_equal(
        group_advantages([1, 7, 0, 9], ["a", "b", "a", "b"])[[0, 2, 1, 3]],
        group_advantages([1, 0, 7, 9], ["a", "a", "b", "b"]),
    )


def test_equal_rewards_give_exactly_zero_also_where_their_mean_rounds():
    assert group_advantages([0.1] * 3, ["a"] * 3).tolist() == [0.0] * 3


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="1 of 2"):
        group_advantages([1.0, float("nan")], ["a", "a"])


@given(batches, st.randoms(use_true_random=False), st.sampled_from(["std", "none"]))
def test_shuffling_rows_shuffles_advantages(batch, random, scale):
    rewards, groups = zip(*batch, strict=True)
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order], scale=scale)
    np.testing.assert_allclose(shuffled, group_advantages(rewards, groups, scale=scale)[order], atol=1e-5)


@given(batches)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_its_rewards(batch):
    rewards, groups = (np.array(column) for column in zip(*batch, strict=True))
    advantages = group_advantages(rewards, groups.tolist())
    for group in set(groups.tolist()):
        own, order = advantages[groups == group], np.argsort(rewards[groups == group], kind="stable")
        assert abs(own.sum()) < 1e-4
        assert (np.diff(own[order]) >= -1e-9).all()
