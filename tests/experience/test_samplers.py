"""Which groups are trained on: the samplers, the evictors, and how they are put together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import LaminarError, UserError
from laminar.experience.evictors import capacity, equal_rewards, older_than, staleness_ceiling
from laminar.experience.facts import Group, Row
from laminar.experience.samplers import Choice, Rules, choose, fifo, freshest, named, priority

VERSIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8)


def ready(versions: Sequence[tuple[int, int]], rewards: Sequence[float] = (0.0, 1.0)) -> list[Group]:
    return [
        Group(
            f"g{n}",
            2,
            tuple(Row(f"g{n}-{i}", f"g{n}", i, 2, v, None, rewards[i], 100.0 + n) for i, v in enumerate(pair)),
            completed=n,
        )
        for n, pair in enumerate(versions)
    ]


def chosen(groups_ready: list[Group], groups: int = 1, version: int = 9, now: float = 0.0, **rules: Any) -> Choice:
    return choose(groups_ready, groups=groups, version=version, now=now, rules=Rules(**rules))


@settings(deadline=None)
@given(VERSIONS, st.integers(1, 4), st.integers(9, 20), st.none() | st.integers(0, 12))
def test_no_row_is_staler_than_the_ceiling_and_nothing_fresh_is_passed_over(
    versions: list[tuple[int, int]], groups: int, version: int, ceiling: int | None
) -> None:
    evictors = () if ceiling is None else (staleness_ceiling(ceiling),)
    choice = chosen(ready(versions), groups, version, evictors=evictors)
    limit = version + 1 if ceiling is None else ceiling
    stale = [f"g{n}" for n, pair in enumerate(versions) if version - min(pair) > limit]
    fresh = [f"g{n}" for n, pair in enumerate(versions) if version - min(pair) <= limit]
    assert list(choice.evict) == stale
    assert list(choice.take) == (fresh[:groups] if len(fresh) >= groups else [])


@settings(deadline=None)
@given(VERSIONS, st.integers(1, 4), st.sampled_from([fifo, freshest, priority("reward"), priority("weight_version")]))
def test_every_sampler_takes_ready_groups_once_or_none(
    versions: list[tuple[int, int]], groups: int, sampler: Any
) -> None:
    names = [group.id for group in ready(versions)]
    take = chosen(ready(versions), groups, sampler=sampler).take
    assert len(take) == len(set(take)) == (groups if len(names) >= groups else 0)
    assert set(take) <= set(names)


@settings(deadline=None)
@given(VERSIONS)
def test_the_freshest_goes_first_and_among_equals_the_longest_complete(versions: list[tuple[int, int]]) -> None:
    order = freshest(ready(versions), groups=1, version=9)
    assert order == sorted(order, key=lambda name: (-min(versions[int(name[1:])]), int(name[1:])))


def test_priority_is_by_the_mean_of_a_column_or_by_a_function() -> None:
    groups = ready([(1, 1), (3, 3), (2, 2)])
    assert chosen(groups, 2, sampler=priority("weight_version")).take == ("g1", "g2")
    assert chosen(groups, 2, sampler=priority("weight_version", highest_first=False)).take == ("g0", "g2")
    assert chosen(groups, 1, sampler=priority(lambda group: group.finished_at)).take == ("g2",)


def test_a_column_that_the_index_does_not_keep_names_the_nearest() -> None:
    with pytest.raises(UserError, match="no column 'weight_versions' of numbers, did you mean 'weight_version'"):
        priority("weight_versions")


def test_dynamic_sampling_skips_groups_whose_rewards_are_all_equal_and_says_how_many() -> None:
    equal, mixed = ready([(1, 1)] * 3, rewards=(1.0, 1.0)), ready([(1, 1)] * 4)[3:]
    choice = chosen([*equal, *mixed], evictors=(equal_rewards,))
    assert choice.take == ("g3",)
    assert choice.evict == dict.fromkeys(("g0", "g1", "g2"), "equal_rewards")


def test_age_staleness_and_capacity_each_give_their_reason_and_the_first_counts() -> None:
    groups = ready([(0, 9), (9, 9), (9, 9), (9, 9)])
    evictors = (staleness_ceiling(3), older_than(60.0), capacity(2))
    choice = chosen(groups, now=161.5, evictors=evictors)
    assert choice.evict == {"g0": "stale", "g1": "age", "g2": "capacity"}
    assert choice.take == ("g3",)


def test_the_users_own_sampler_and_evictor_are_functions_like_ours() -> None:
    def newest_complete(ready: Sequence[Group], *, groups: int, version: int) -> list[str]:
        return [group.id for group in reversed(ready)]

    def odd(ready: Sequence[Group], *, version: int, now: float) -> dict[str, str]:
        return {group.id: "odd" for group in ready if int(group.id[1:]) % 2}

    choice = chosen(ready([(1, 1)] * 4), 2, sampler=newest_complete, evictors=(odd,))
    assert (choice.take, choice.evict) == (("g2", "g0"), {"g1": "odd", "g3": "odd"})


def sampler_that(answer: Callable[[], Any]) -> Any:
    def mine(ready: Sequence[Group], *, groups: int, version: int) -> Any:
        return answer()

    return mine


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: ["nowhere"], "sampling function `mine` named 'nowhere', which is no ready group"),
        (lambda: ["g0", "g0"], "sampling function `mine` named 'g0', which is no ready group or was named before"),
        (lambda: 1 / 0, "sampling function `mine` raised ZeroDivisionError: division by zero; correct it and resume"),
    ],
)
def test_a_wrong_function_of_the_users_is_one_line_that_names_it(answer: Callable[[], Any], why: str) -> None:
    with pytest.raises(LaminarError, match=why):
        chosen(ready([(1, 1), (1, 1)]), 2, sampler=sampler_that(answer))


def test_a_sampler_may_hold_groups_back_and_then_none_is_taken() -> None:
    assert chosen(ready([(1, 1), (1, 1)]), 2, sampler=sampler_that(lambda: ["g1"])) == Choice()


def test_a_row_from_a_later_version_is_an_error_and_not_a_negative_staleness() -> None:
    with pytest.raises(ValueError, match="group g0 was generated by version 7, which is later than version 6"):
        chosen(ready([(5, 7)]), version=6)


def test_rules_travel_to_the_data_worker() -> None:
    rules = Rules(priority("reward"), (staleness_ceiling(2), older_than(5), capacity(9), equal_rewards))
    assert pickle.loads(pickle.dumps(rules)).evictors[0]([], version=0, now=0.0) == {}


def test_a_misspelt_sampling_names_the_nearest() -> None:
    assert named("fifo") is fifo
    with pytest.raises(UserError, match="there is no sampling 'freshet', did you mean 'freshest'"):
        named("freshet")
