"""Rows and their groups: there once, told apart by id, and as they were written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from laminar.experience.reader import Experience
from tests.experience.conftest import Open
from tests.experience.rows import batch, group, ids, lease, one


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


def test_two_groups_with_the_same_prompt_text_stay_two(reopen: Open) -> None:
    """NeMo-RL #3882: groups were told apart by their prompt's tokens, and two tasks became one."""
    table = reopen()
    same = {"prompt_text": "1 + 1 =", "prompt_ids": [5, 6], "prompt_id": "sum-1"}
    table.append(batch(*(one(name, sample, **same) for sample in range(2) for name in ("a", "b"))))
    assert lease(table).table["group_id"].to_pylist() == ["a", "a"]
    assert lease(table).table["group_id"].to_pylist() == ["b", "b"]


def test_uneven_groups_keep_to_themselves(reopen: Open) -> None:
    """slime #1414, #2230, AReaL #1419: groups of 4, 3 and 1 were cut by a fixed size."""
    table = reopen()
    rows = [one(name, n, size=size) for name, size in (("four", 4), ("three", 3), ("one", 1)) for n in range(size)]
    table.append(batch(*rows[::-1]))
    found = lease(table, groups=2)
    assert found.table["group_id"].to_pylist() == ["four"] * 4 + ["three"] * 3
    assert table.counts()["evicted_too_few_rows"] == 1


def test_rows_without_a_reward_are_counted_and_never_leased(reopen: Open) -> None:
    """TRL #2737: a row that cannot be scored is left out, and its reward is not 0."""
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
