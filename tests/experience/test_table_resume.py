"""After a crash, a restart or a resume: nothing lost, nothing trained twice, nothing too stale."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from laminar.errors import LaminarError
from laminar.experience.prompt_pool import Draw, PromptPool, Source
from laminar.experience.table import ExperienceTable
from tests.experience.conftest import Open
from tests.experience.rows import group, ids, lease


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


def test_rewinding_returns_exactly_what_was_trained_after_the_checkpoint(reopen: Open) -> None:
    table = reopen()
    for step in (1, 2, 3):
        table.append(group(f"g{step}"))
        table.commit(lease(table).id, step=step, version=step - 1)
    assert table.rewind(1) == 4
    again = reopen()
    assert again.trained_rows() == 2
    assert lease(again, groups=2).groups == ["g2", "g3"]


def test_the_staleness_bound_still_holds_after_a_resume_at_version_100(reopen: Open) -> None:
    """AReaL #1388: after a resume the counter began at 0 and staleness was unbounded."""
    table = reopen()
    table.append(group("g97", version=97))
    table.append(group("g98", version=98))
    table.append(group("g100", version=100))
    found = lease(reopen(), groups=2, version=100, ceiling=2)
    assert found.groups == ["g100", "g98"]


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


def test_a_resume_has_under_way_what_was_under_way_before_and_no_more(reopen: Open) -> None:
    """verl #7759: a resume took up what was in flight and handed out the first batches once more beside it."""
    limit = 8
    table, pool = reopen(), PromptPool([Source("a", 100)], seed=0)
    before = [draw.group_id for draw in pool.take(limit)]
    for name in (before[0], before[1], before[5]):
        table.append(group(name))
    table.append(group(before[2], samples=[1]))
    table.commit(lease(table).id, step=1, version=0)
    before = [*before[1:], *(draw.group_id for draw in pool.take(1))]  # in the place of what was trained

    again, pool = reopen(), PromptPool([Source("a", 100)], seed=0)
    pool.consume(Draw.number(name) for name in again.groups_settled())
    end = 1 + max(Draw.number(name) for name in again.groups_seen())
    whole = {row.id for row in again._index.ready()}
    begun = [draw.group_id for draw in pool.take(end, before=end) if draw.group_id not in whole]
    new = [draw.group_id for draw in pool.take(limit - len(whole) - len(begun))]
    assert sorted([*whole, *begun, *new]) == sorted(before)
