"""The prompt pool: every prompt once an epoch, in an order that can be repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import UserError
from laminar.experience.prompt_pool import PromptPool


def test_a_data_set_shorter_than_the_run_is_iterated_again() -> None:
    """NeMo-RL #2899: the collector ended with the epoch and the trainer waited for ever."""
    draws = PromptPool(3, seed=0).take(10)
    assert [draw.epoch for draw in draws] == [0] * 3 + [1] * 3 + [2] * 3 + [3]
    assert len({draw.group_id for draw in draws}) == 10


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    pool = PromptPool(50, seed=0)
    first, second = ([draw.index for draw in pool.take(50)] for _ in range(2))
    other = [draw.index for draw in PromptPool(50, seed=1).take(50)]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert first != second and first != other


@given(st.integers(1, 7), st.integers(0, 3), st.lists(st.integers(0, 5), max_size=6), st.integers(0, 20))
def test_a_restored_pool_goes_on_where_it_stood(length: int, seed: int, takes: list[int], more: int) -> None:
    pool, again = PromptPool(length, seed), PromptPool(length, seed)
    drawn = [draw for count in takes for draw in pool.take(count)]
    again.restore(pool.state())
    assert drawn + again.take(more) == PromptPool(length, seed).take(sum(takes) + more)


def test_another_length_or_seed_is_refused_with_both_numbers() -> None:
    state = PromptPool(3, seed=0).state()
    with pytest.raises(UserError, match="has length 3, this environment's has 4"):
        PromptPool(4, seed=0).restore(state)
    with pytest.raises(UserError, match="has seed 0, this environment's has 1"):
        PromptPool(3, seed=1).restore(state)


def test_an_empty_environment_is_refused() -> None:
    with pytest.raises(UserError, match="0 prompts, expected at least one"):
        PromptPool(0, seed=0)
