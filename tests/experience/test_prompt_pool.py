"""The prompt pool: every prompt once an epoch, in an order that can be repeated, none skipped and none twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import UserError
from laminar.experience.prompt_pool import Draw, PromptPool, Source, remember
from laminar.experience.table import ExperienceTable


def pool(*lengths: int, seed: int = 0, epochs: int | None = None, weights: tuple[float, ...] = ()) -> PromptPool:
    """One source of each length, named a, b, …"""
    sources = [
        Source("abcdef"[n], length, "f" * 20, weights[n] if weights else 1.0, sum(lengths[:n]))
        for n, length in enumerate(lengths)
    ]
    return PromptPool(sources, seed, epochs=epochs)


def test_a_data_set_shorter_than_the_run_is_iterated_again() -> None:
    """NeMo-RL #2899: the collector ended with the epoch and the trainer waited for ever."""
    draws = pool(3).take(10)
    assert [draw.epoch for draw in draws] == [0] * 3 + [1] * 3 + [2] * 3 + [3]
    assert len({draw.group_id for draw in draws}) == 10


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    one = pool(50)
    first, second = ([draw.index for draw in one.take(50)] for _ in range(2))
    other = [draw.index for draw in pool(50, seed=1).take(50)]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert first != second and first != other


def test_told_to_stop_at_the_end_it_gives_every_prompt_and_no_more() -> None:
    ending = pool(3, 2, epochs=2)
    draws = ending.take(100)
    assert Counter(draw.index for draw in draws) == dict.fromkeys(range(5), 2)
    assert ending.exhausted and ending.take(1) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(20, 80))
@settings(deadline=None)
def test_sources_are_mixed_by_weight_at_every_moment(weights: list[int], count: int) -> None:
    draws = pool(*[7] * len(weights), weights=tuple(map(float, weights))).take(count)
    for end in range(1, count + 1):
        shares = Counter(draw.index // 7 for draw in draws[:end])
        assert all(abs(shares[n] - end * weight / sum(weights)) <= len(weights) for n, weight in enumerate(weights))


def test_higher_priorities_come_first_in_every_epoch() -> None:
    source = Source("a", 6, priority=lambda index: float(index % 3))
    indices = [draw.index % 3 for draw in PromptPool([source], seed=0).take(12)]
    assert indices == [2, 2, 1, 1, 0, 0] * 2


@given(st.integers(1, 7), st.integers(0, 3), st.sets(st.integers(0, 30)), st.integers(31, 60))
@settings(deadline=None)
def test_a_resume_draws_what_was_not_consumed_and_nothing_else(
    length: int, seed: int, consumed: set[int], count: int
) -> None:
    """NeMo-RL #3599: the cursor ran ahead of training, and a resume skipped 675 of 736 prompts."""
    whole = pool(length, seed=seed).take(count)
    again = pool(length, seed=seed)
    again.consume(consumed)
    left = again.take(count - len(consumed))
    assert [draw for draw in whole if draw.draw not in consumed] == left


def test_what_was_begun_is_drawn_before_anything_new() -> None:
    again = pool(5)
    again.consume([0, 1, 3])
    assert [draw.draw for draw in again.take(99, before=5)] == [2, 4]
    assert [draw.draw for draw in again.take(2)] == [5, 6]


def test_another_data_set_or_seed_is_refused_on_resume_and_says_both(tmp_path: Path) -> None:
    url = str(tmp_path)
    ExperienceTable(url).close()
    for _ in range(2):
        remember(url, pool(3))
    with pytest.raises(UserError, match=r"began with `a` \(3 prompts.* at seed 0, now it is `a` \(4 prompts"):
        remember(url, pool(4))
    with pytest.raises(UserError, match=r"at seed 0, now it is .* at seed 1: resume with the data and the seed"):
        remember(url, pool(3, seed=1))


@pytest.mark.parametrize(("length", "weight", "why"), [(0, 1.0, "has 0 prompts"), (1, 0.0, "weight of `a` is 0")])
def test_an_empty_source_or_a_weight_of_nothing_is_refused(length: int, weight: float, why: str) -> None:
    with pytest.raises(UserError, match=why):
        PromptPool([Source("a", length, weight=weight)], seed=0)


def test_a_groups_name_tells_its_draw() -> None:
    assert Draw.number(Draw(1234567, 0, 0).group_id) == 1234567
