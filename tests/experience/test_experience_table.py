"""The experience table: nothing lost, nothing twice, nothing too stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from laminar.errors import LaminarError
from laminar.experience.reader import Experience
from laminar.experience.table import ExperienceTable, Lease
from tests.experience.rows import batch, group, one
from tests.experience.stores import full_disk

Open = Callable[..., ExperienceTable]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """Opens the table of one run, again and again; a table opened before is as good as dead."""
    tables: list[ExperienceTable] = []

    def _open(**options: int) -> ExperienceTable:
        tables.append(ExperienceTable(str(tmp_path / "run"), **options))
        return tables[-1]

    yield _open
    for table in tables:
        table.close()


def lease(table: ExperienceTable, groups: int = 1, version: int = 0, ceiling: int | None = None) -> Lease:
    found = table.lease(groups, version=version, staleness_ceiling=ceiling, lessee="trainer")
    assert found is not None
    return found


def ids(lease: Lease) -> list[str]:
    return lease.table["trajectory_id"].to_pylist()


def test_a_row_sent_again_is_there_once(reopen: Open) -> None:
    table = reopen()
    assert table.append(group("g0")) == ["g0-0", "g0-1"]
    assert table.append(batch(one("g0", 1), one("g1", 0), one("g1", 0))) == ["g1-0"]
    assert table.counts()["rows"] == 3
    again = reopen()
    assert again.append(group("g1")) == ["g1-1"]
    assert again.counts()["rows"] == 4


def test_a_second_attempt_does_not_replace_a_finished_row(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0", attempt_run_id=1, response_text="first"))
    assert table.append(group("g0", attempt_run_id=2, response_text="second")) == []
    assert lease(table).table["response_text"].to_pylist() == ["first", "first"]


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


def test_two_groups_with_the_same_prompt_text_stay_two(reopen: Open) -> None:
    """NeMo-RL #3882: groups were told apart by their prompt's tokens, and two tasks became one."""
    table = reopen()
    same = {"prompt_text": "1 + 1 =", "prompt_ids": [5, 6], "prompt_id": "sum-1"}
    table.append(batch(*(one(name, sample, **same) for sample in range(2) for name in ("a", "b"))))
    assert lease(table).table["group_id"].to_pylist() == ["a", "a"]
    assert lease(table).table["group_id"].to_pylist() == ["b", "b"]


def test_uneven_groups_keep_to_themselves(reopen: Open) -> None:
    """slime #1414: groups of 4, 3 and 1 were cut by a fixed size."""
    table = reopen()
    rows = [one(name, n, size=size) for name, size in (("four", 4), ("three", 3), ("one", 1)) for n in range(size)]
    table.append(batch(*rows[::-1]))
    found = lease(table, groups=2)
    assert found.table["group_id"].to_pylist() == ["four"] * 4 + ["three"] * 3
    assert table.counts()["evicted_too_few_rows"] == 1


def test_rows_without_a_reward_are_counted_and_never_leased(reopen: Open) -> None:
    table = reopen()
    table.append(batch(one("g0", 0, size=3), one("g0", 1, size=3, drop_reason="reward_timeout"), one("g0", 2, size=3)))
    assert ids(lease(table)) == ["g0-0", "g0-2"]
    assert table.counts()["dropped_reward_timeout"] == 1


def test_a_group_with_nothing_to_compare_is_evicted_and_stays_so(reopen: Open) -> None:
    table = reopen()
    table.append(batch(one("g0", 0), one("g0", 1, drop_reason="reward_error")))
    assert table.ready_groups() == 0
    again = reopen()
    assert again.counts() == table.counts()
    assert again.counts()["evicted_too_few_rows"] == 1


def test_a_committed_row_is_never_leased_again_also_after_a_restart(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    table.commit(lease(table).id, step=1, version=0)
    again = reopen()
    assert again.trained_rows() == 2
    assert again.ready_groups() == 0
    assert again.append(group("g0")) == []


def test_leases_die_with_the_owner(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    lease(table)
    assert ids(lease(reopen())) == ["g0-0", "g0-1"]


def test_a_commit_counts_although_the_owner_was_restarted_since_the_lease(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    held = lease(table)
    again = reopen()
    again.commit(held.id, step=1, version=0, groups=held.groups)
    assert (again.trained_rows(), again.ready_groups()) == (2, 0)
    third = reopen()
    third.commit(held.id, step=1, version=0, groups=held.groups)
    assert third.trained_rows() == 2


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


def test_rewinding_returns_exactly_what_was_trained_after_the_checkpoint(reopen: Open) -> None:
    table = reopen()
    for step in (1, 2, 3):
        table.append(group(f"g{step}"))
        table.commit(lease(table).id, step=step, version=step - 1)
    assert table.rewind(1) == 4
    again = reopen()
    assert again.trained_rows() == 2
    assert lease(again, groups=2).groups == ["g2", "g3"]


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


def test_the_staleness_bound_still_holds_after_a_resume_at_version_100(reopen: Open) -> None:
    """AReaL #1388: after a resume the counter began at 0 and staleness was unbounded."""
    table = reopen()
    table.append(group("g97", version=97))
    table.append(group("g98", version=98))
    table.append(group("g100", version=100))
    found = lease(reopen(), groups=2, version=100, ceiling=2)
    assert found.groups == ["g100", "g98"]


def test_a_ceiling_of_zero_gives_the_current_version_only(reopen: Open) -> None:
    """verl #4449: the setting documented as on-policy was one step off."""
    table = reopen()
    table.append(group("g0", version=4))
    assert table.lease(1, version=5, staleness_ceiling=0, lessee="trainer") is None
    table.append(group("g1", version=5))
    assert lease(table, version=5, ceiling=0).table["weight_version"].to_pylist() == [5, 5]


def test_payloads_beyond_the_budget_are_read_again_from_their_files(reopen: Open) -> None:
    table = reopen(memory_bytes=20_000, compact_after=4)
    for number in range(30):
        table.append(group(f"g{number:02d}", tokens=200, response_text=f"text of {number}"))
        assert table.memory_used() <= 20_000
    found = lease(table, groups=30)
    assert found.table["response_text"].to_pylist() == [f"text of {n}" for n in range(30) for _ in range(2)]
    assert found.table["response_ids"].to_pylist() == [[10] * 200, [11] * 200] * 30
    assert found.table.schema == group("g").schema


def test_segments_are_compacted_and_nothing_changes_for_anybody(reopen: Open, tmp_path: Path) -> None:
    table = reopen(compact_after=4)
    for number in range(9):
        table.append(group(f"g{number}"))
        table.commit(lease(table).id, step=number, version=0)
    table.close()
    files = sorted(path.name for path in (tmp_path / "run/experience").rglob("*.parquet"))
    assert len(files) >= 2
    assert len(list((tmp_path / "run/experience/rows/segments").iterdir())) < 9
    assert reopen().counts() == table.counts()
    assert Experience(str(tmp_path / "run")).query("select count(*) as n from experience")["n"].to_pylist() == [18]


def test_a_batch_with_a_contradiction_adds_nothing(reopen: Open) -> None:
    table = reopen()
    with pytest.raises(ValueError, match="group_size is 3, its group's is 2"):
        table.append(batch(one("g0", 0), one("g1", 0), one("g0", 1, size=3)))
    assert table.counts()["rows"] == 0
    assert reopen().counts()["rows"] == 0


def test_a_batch_of_another_schema_is_refused(reopen: Open) -> None:
    with pytest.raises(ValueError, match=r"the batch's columns are \['n'\]"):
        reopen().append(pa.RecordBatch.from_pydict({"n": [1]}))


def test_counts_and_groups_seen_tell_where_everything_is(reopen: Open) -> None:
    table = reopen()
    table.append(group("g0"))
    table.append(group("g1", samples=[0]))
    lease(table)
    expected = {"rows": 3, "ready": 1, "leased": 2, "trained": 0, "evicted": 0}
    assert table.counts() == expected | {"groups": 2, "groups_ready": 0, "groups_open": 1}
    assert table.groups_seen() == {"g0", "g1"}
    assert table.waiting_for(1) == (
        "waiting for 1 complete group: 0 are complete, 1 of 2 trajectories of group g1 still to come"
    )


def test_a_full_disk_refuses_the_work_and_loses_nothing_acknowledged() -> None:
    with full_disk() as disk:
        table = ExperienceTable(disk.url)
        table.append(group("g0"))
        held = lease(table)
        disk.room = 0
        with pytest.raises(LaminarError, match="No space left on device"):
            table.append(group("g1"))
        with pytest.raises(LaminarError, match="No space left on device"):
            table.commit(held.id, step=1, version=0)
        assert (table.counts()["rows"], table.trained_rows()) == (2, 0)
        disk.room = 100
        table.commit(held.id, step=1, version=0)
        assert table.append(group("g1")) == ["g1-0", "g1-1"]
        again = ExperienceTable(disk.url)
        assert (again.counts()["rows"], again.trained_rows(), again.ready_groups()) == (4, 2, 1)


def test_a_verdict_that_could_not_be_written_comes_again() -> None:
    with full_disk() as disk:
        table = ExperienceTable(disk.url)
        last = group("g0", size=1)
        disk.room = 1
        with pytest.raises(LaminarError, match="No space left on device"):
            table.append(last)
        disk.room = 100
        assert table.append(last) == []
        assert ExperienceTable(disk.url).counts()["evicted_too_few_rows"] == 1
