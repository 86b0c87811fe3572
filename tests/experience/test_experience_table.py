"""The experience table: nothing lost, nothing twice, nothing too stale."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from laminar.errors import LaminarError, UserError
from laminar.experience.evictors import equal_rewards, older_than
from laminar.experience.prompt_pool import Draw, PromptPool, Source
from laminar.experience.reader import Experience
from laminar.experience.samplers import Rules, freshest
from laminar.experience.store import StoreError
from laminar.experience.table import ExperienceTable, Lease
from tests.experience.rows import batch, group, one
from tests.experience.stores import full_disk

Open = Callable[..., ExperienceTable]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """Opens the table of one run, again and again; a table opened before is as good as dead."""
    tables: list[ExperienceTable] = []

    def _open(**options: Any) -> ExperienceTable:
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
    table = reopen(rules=Rules(freshest, (equal_rewards, older_than(50.0))), now=lambda: 100.0)
    table.append(group("equal", version=5, finished_at=100.0, reward=1.0))
    table.append(group("old", version=5, finished_at=49.0))
    table.append(group("early", version=3, finished_at=100.0))
    table.append(group("late", version=4, finished_at=100.0))
    assert lease(table, version=5).groups == ["late"]
    assert table.counts() | {"evicted_equal_rewards": 2, "evicted_age": 2} == table.counts()
    assert "(2 evicted_age, 2 evicted_equal_rewards)" in table.waiting_for(2)
    assert reopen().counts()["evicted_age"] == 2


def test_a_new_owner_takes_the_table_and_the_old_one_writes_no_more(reopen: Open) -> None:
    old = reopen()
    old.append(group("g0"))
    held = lease(old)
    new = reopen()
    lost = "has a new owner .* which has all that was acknowledged; this one has lost it"
    with pytest.raises(LaminarError, match=lost):
        old.append(group("g1"))
    with pytest.raises(LaminarError, match=lost):
        old.commit(held.id, step=1, version=0)
    with pytest.raises(LaminarError, match=lost):
        lease(old)
    new.append(group("g1"))
    assert lease(new, groups=2).groups == ["g0", "g1"]
    assert reopen().counts()["rows"] == 4


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


def test_scattered_rows_are_gathered_as_they_were_written(reopen: Open) -> None:
    table = reopen(compact_after=3)
    names = [f"g{n}" for n in range(12)]
    for sample in range(4):
        for start in (0, 1, 2):
            table.append(batch(*(one(n, sample, size=4, tokens=1 + int(n[1:])) for n in names[start::3])))
    found = lease(table, groups=12)
    lengths = [len(ids) for ids in found.table["response_ids"].to_pylist()]
    assert lengths == [1 + int(name[1:]) for name in sorted(names) for _ in range(4)]
    assert found.table["response_ids"].to_pylist() == [[10 + n % 4] * length for n, length in enumerate(lengths)]
    assert found.table.schema == group("g").schema


def test_a_store_that_vanishes_is_one_line_and_when_it_is_back_nothing_is_missing(tmp_path: Path) -> None:
    table = ExperienceTable(str(tmp_path / "run"))
    table.append(group("g0"))
    held = lease(table)
    (tmp_path / "run").rename(tmp_path / "away")
    for work in (
        lambda: table.append(group("g1")),
        lambda: table.commit(held.id, step=1, version=0),
        lambda: lease(table),
    ):
        with pytest.raises(StoreError) as error:
            work()
        assert str(error.value).startswith(str(tmp_path / "run/experience")) and "\n" not in str(error.value)
    (tmp_path / "away").rename(tmp_path / "run")
    table.commit(held.id, step=1, version=0)
    assert table.append(group("g1")) == ["g1-0", "g1-1"]
    table.close()
    again = ExperienceTable(str(tmp_path / "run"))
    assert (again.counts()["rows"], again.trained_rows()) == (4, 2)
    again.close()


def test_a_read_only_store_is_one_line_before_anything_starts() -> None:
    with full_disk() as disk:
        disk.refuses = errno.EROFS
        with pytest.raises(UserError, match=f"cannot write to {disk.url}/experience: Read-only file system; give a "):
            ExperienceTable(disk.url)


def test_what_was_repaired_at_opening_is_said(reopen: Open, tmp_path: Path) -> None:
    table = reopen()
    table.append(group("g0"))
    table.append(group("g1"))
    (last,) = (tmp_path / "run/experience/rows/segments").glob("000000000002.*")
    last.write_bytes(last.read_bytes()[:-100])
    again = reopen()
    assert again.counts()["rows"] == 2
    (note,) = again.notes
    assert "is torn" in note and "never acknowledged and is set aside" in note


def test_a_resume_of_a_finished_run_trains_nothing_again(reopen: Open) -> None:
    """verl #7935, #6232: a restart made one more step, or counted one twice."""
    table = reopen()
    for step in (1, 2):
        table.append(group(f"g{step}"))
        table.commit(lease(table).id, step=step, version=step - 1)
    again = reopen()
    assert again.rewind(2) == 0
    assert again.lease(1, version=2, staleness_ceiling=None, lessee="trainer") is None
    assert again.trained_rows() == 4


def test_oversampled_groups_that_were_never_trained_are_there_after_a_resume(reopen: Open) -> None:
    """OpenRLHF #1322: oversampled, untrained rollouts were lost on resume and success was reported."""
    table = reopen()
    for number in range(5):
        table.append(group(f"g{number}"))
    table.commit(lease(table, groups=2).id, step=1, version=0)
    again = reopen()
    assert lease(again, groups=3).groups == ["g2", "g3", "g4"]


def test_a_resume_trains_the_same_prompts_as_an_undisturbed_run(tmp_path: Path) -> None:
    """NeMo-RL #3599: 675 of 736 prompts were skipped after a kill; the cursor had run ahead."""

    def trained_after(url: str, kills: set[int]) -> Counter[int]:
        table, pool = ExperienceTable(url), PromptPool([Source("a", 6)], seed=0, epochs=2)
        trained: Counter[int] = Counter()
        running: list[Draw] = []
        for moment in range(100):
            if moment in kills:
                table, pool = ExperienceTable(url), PromptPool([Source("a", 6)], seed=0, epochs=2)
                pool.consume(Draw.number(name) for name in table.groups_settled())
                end = 1 + max((Draw.number(name) for name in table.groups_seen()), default=-1)
                running = [draw for draw in pool.take(end, before=end) if draw.group_id not in table.groups_seen()]
            running += pool.take(3 - len(running))
            if not running and not table.ready_groups():
                break
            for draw in [running.pop(0), *running[1:][:1]] if running else []:  # out of order: long ones stay behind
                table.append(group(draw.group_id, prompt_id=str(draw.index)))
            running = [draw for draw in running if draw.group_id not in table.groups_seen()]
            held = table.lease(1, version=0, staleness_ceiling=None, lessee="trainer")
            if held is not None:
                table.commit(held.id, step=moment, version=0)
                trained[int(held.table["prompt_id"][0].as_py())] += 1
        table.close()
        return trained

    undisturbed = trained_after(str(tmp_path / "a"), set())
    assert undisturbed == dict.fromkeys(range(6), 2)
    assert trained_after(str(tmp_path / "b"), {2, 3, 7, 11}) == undisturbed
