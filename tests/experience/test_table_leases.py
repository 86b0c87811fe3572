"""Leases, what may be leased, and what becomes of it: committed, given back, expired or evicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.errors import LaminarError
from laminar.experience.evictors import equal_rewards, older_than
from laminar.experience.samplers import Rules, freshest
from laminar.experience.table import ExperienceTable
from tests.experience.conftest import Open
from tests.experience.rows import batch, group, ids, lease, one


def test_a_lease_has_whole_groups_sorted_by_group_and_sample(reopen: Open) -> None:
    table = reopen()
    table.append(batch(one("g2", 1), one("g1", 1), one("g3", 0)))
    table.append(batch(one("g2", 0, tokens=7), one("g1", 0)))
    found = lease(table, groups=2)
    assert found.groups == ["g1", "g2"]
    assert ids(found) == ["g1-0", "g1-1", "g2-0", "g2-1"]
    assert len(found.table["response_ids"][2]) == 7
    assert table.lease(1, version=0, staleness_ceiling=None, lessee="trainer") is None


def test_groups_are_leased_in_the_order_in_which_they_became_complete(reopen: Open) -> None:
    table = reopen()
    table.append(group("late", samples=[0]))
    table.append(group("early"))
    table.append(group("late", samples=[1]))
    first = lease(table)
    assert first.groups == ["early"]
    assert lease(table).groups == ["late"]
    table.release(first.id)
    table.append(group("last"))
    assert lease(table).groups == ["early"]


def test_a_commit_is_idempotent(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    held = lease(table)
    for _ in range(2):
        table.commit(held.id, step=1, version=0)
    assert table.trained_rows() == 2


def test_a_released_lease_cannot_be_committed(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    held = lease(table)
    assert table.release_all("somebody else") == 0
    assert table.release_all("trainer") == 1
    with pytest.raises(LaminarError, match=f"lease {held.id} is released: its rows cannot be committed for step 1"):
        table.commit(held.id, step=1, version=0, groups=held.groups)
    assert lease(table).groups == ["g0"]


@pytest.mark.parametrize("groups", [(), ("g0",), ("nowhere",)])
def test_an_unknown_lease_cannot_take_what_another_holds(reopen: Open, groups: tuple[str, ...]) -> None:
    table = reopen()
    table.append(group("g0"))
    lease(table)
    with pytest.raises(LaminarError, match="lease old is unknown"):
        table.commit("old", step=1, version=0, groups=groups)


def test_no_row_is_staler_than_the_ceiling_and_the_rest_of_its_group_goes_too(reopen: Open) -> None:
    table = reopen()
    table.append(batch(one("old", 0, version=3), one("old", 1, version=9)))
    table.append(group("new", version=8))
    found = lease(table, version=10, ceiling=2)
    assert found.groups == ["new"]
    assert table.counts()["evicted_stale"] == 2
    again = reopen()
    assert again.counts()["evicted_stale"] == 2
    assert lease(again, version=10).groups == ["new"]


def test_a_ceiling_of_zero_gives_the_current_version_only(reopen: Open) -> None:
    """verl #4449: the setting documented as on-policy was one step off."""
    table = reopen()
    table.append(group("g0", version=4))
    assert table.lease(1, version=5, staleness_ceiling=0, lessee="trainer") is None
    table.append(group("g1", version=5))
    assert lease(table, version=5, ceiling=0).table["weight_version"].to_pylist() == [5, 5]


def test_an_expired_lease_gives_its_rows_back_and_the_next_trainer_has_them(tmp_path: Path) -> None:
    now = [0.0]
    table = ExperienceTable(str(tmp_path), clock=lambda: now[0])
    table.append(group("g0"))
    held = table.lease(1, version=0, staleness_ceiling=None, lessee="a", seconds=10.0)
    assert held is not None
    now[0] = 9.9
    assert table.lease(1, version=0, staleness_ceiling=None, lessee="b") is None
    now[0] = 10.0
    assert lease(table).groups == ["g0"]
    with pytest.raises(LaminarError, match=f"lease {held.id} is expired: its rows cannot be committed for step 1"):
        table.commit(held.id, step=1, version=0, groups=held.groups)
    table.close()


def test_a_trainer_that_was_slower_than_its_lease_may_commit_what_nobody_took_since(tmp_path: Path) -> None:
    now = [0.0]
    table = ExperienceTable(str(tmp_path), clock=lambda: now[0])
    table.append(group("g0"))
    held = table.lease(1, version=0, staleness_ceiling=None, lessee="a", seconds=10.0)
    assert held is not None
    now[0] = 11.0
    table.commit(held.id, step=1, version=0, groups=held.groups)
    assert table.trained_rows() == 2
    table.close()


def test_a_group_given_up_on_request_keeps_its_reason_and_late_rows_follow_it(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0", size=3, samples=[0, 1]))
    assert table.evict(["g0", "never-seen"], "version_gone") == 2
    assert table.groups_settled() == {"g0"}  # what is missing of it need not be generated
    table.append(group("g0", size=3, samples=[2]))
    assert table.counts()["evicted_version_gone"] == 3
    again = reopen()
    assert (again.counts()["evicted_version_gone"], again.ready_groups()) == (3, 0)
    assert again.groups_settled() == {"g0"}


def test_what_is_leased_cannot_be_evicted(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    held = lease(table)
    assert table.evict(["g0"], "capacity") == 0
    table.commit(held.id, step=1, version=0)
    assert table.trained_rows() == 2


def test_the_tables_rules_choose_and_evict_and_the_reasons_are_counted(reopen: Open) -> None:
    """AReaL #450: after dynamic sampling the batch was short and nobody said so."""
    table = reopen(rules=Rules(freshest, (equal_rewards, older_than(50.0))), now=lambda: 100.0)
    table.append(group("equal", version=5, finished_at=100.0, reward=1.0))
    table.append(group("old", version=5, finished_at=49.0))
    table.append(group("early", version=3, finished_at=100.0))
    table.append(group("late", version=4, finished_at=100.0))
    assert lease(table, version=5).groups == ["late"]
    assert table.counts() | {"evicted_equal_rewards": 2, "evicted_age": 2} == table.counts()
    assert "(2 evicted_age, 2 evicted_equal_rewards)" in table.waiting_for(2)
    assert reopen().counts()["evicted_age"] == 2


def test_groups_are_settled_once_trained_or_evicted_and_not_before(reopen: Open) -> None:
    table = reopen()
    table.append(batch(*(one("dropped", n, drop_reason="reward_error") for n in range(2))))
    table.append(group("trained"))
    table.append(group("open", samples=[0]))
    held = lease(table)
    assert table.groups_settled() == {"dropped"}
    table.commit(held.id, step=1, version=0)
    assert table.groups_settled() == {"dropped", "trained"}
    table.rewind(0)
    assert table.groups_settled() == {"dropped"}
