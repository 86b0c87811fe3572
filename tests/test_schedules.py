"""The admission rules: never above the limit, never a trainer left without a batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.schedules import backlog_limit, groups_to_admit, lowest_version

sizes = st.tuples(st.integers(1, 8), st.integers(1, 16), st.integers(1, 16), st.none() | st.integers(0, 4))


@given(sizes, st.integers(0, 2000))
def test_what_is_under_way_never_passes_the_limit(drawn: tuple, outstanding: int) -> None:
    group_size, groups, feed, ceiling = drawn
    batch_size = group_size * groups
    limit = backlog_limit(batch_size=batch_size, staleness_ceiling=ceiling)
    admitted = groups_to_admit(outstanding, limit=limit, batch_size=batch_size, group_size=group_size, feed=feed)
    assert admitted >= 0
    assert admitted == 0 or outstanding + admitted * group_size <= limit


@given(sizes, st.data())
def test_the_trainer_always_gets_a_full_batch_in_the_end(drawn: tuple, data: st.DataObject) -> None:
    group_size, groups, feed, ceiling = drawn
    batch_size = group_size * groups
    limit = backlog_limit(batch_size=batch_size, staleness_ceiling=ceiling)
    outstanding = data.draw(st.integers(0, groups - 1)) * group_size
    for _ in range(groups):
        outstanding += group_size * groups_to_admit(
            outstanding, limit=limit, batch_size=batch_size, group_size=group_size, feed=feed
        )
    assert outstanding >= batch_size


@given(st.integers(0, 1000), st.integers(0, 8))
def test_an_admitted_trajectory_is_never_older_than_the_ceiling(version: int, ceiling: int) -> None:
    lowest = lowest_version(version, staleness_ceiling=ceiling)
    assert 0 <= lowest <= version
    assert version - lowest <= ceiling
