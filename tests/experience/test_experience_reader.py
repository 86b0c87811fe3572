"""Reading: SQL over the files, beside a writer and without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laminar.errors import UserError
from laminar.experience.reader import Experience
from laminar.experience.scan import connect
from laminar.experience.schema import SCHEMA
from laminar.experience.store import Store
from laminar.experience.table import ExperienceTable
from tests.experience.rows import batch, group, one
from tests.experience.writers import writer


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run with one group trained, one stale, one ready with a dropped row."""
    table = ExperienceTable(str(tmp_path), compact_after=2)
    table.append(group("trained", version=5))
    lease = table.lease(1, version=5, staleness_ceiling=0, lessee="trainer")
    assert lease is not None
    table.commit(lease.id, step=3, version=5)
    table.append(group("stale", version=1))
    assert table.lease(1, version=5, staleness_ceiling=2, lessee="trainer") is None
    table.append(batch(one("g", 0, size=3), one("g", 1, size=3), one("g", 2, size=3, drop_reason="reward_skipped")))
    table.close()
    return str(tmp_path)


def test_the_view_has_every_column_and_the_life_of_each_row(run: str) -> None:
    everything = Experience(run).to_arrow()
    life = ["state", "trained_step", "trained_version", "evicted_reason"]
    assert everything.column_names == [*SCHEMA.names, *life]
    rows = {row["trajectory_id"]: [row[name] for name in life] for row in everything.to_pylist()}
    assert rows == {
        "trained-0": ["trained", 3, 5, None],
        "trained-1": ["trained", 3, 5, None],
        "stale-0": ["evicted", None, None, "stale"],
        "stale-1": ["evicted", None, None, "stale"],
        "g-0": ["ready", None, None, None],
        "g-1": ["ready", None, None, None],
        "g-2": ["evicted", None, None, "reward_skipped"],
    }


def test_tokens_are_read_back_as_they_were_written(run: str) -> None:
    row = Experience(run).query("select * from experience where trajectory_id = 'g-1'").to_pylist()[0]
    assert (row["response_ids"], row["logprobs"], row["reward"]) == ([11] * 3, [-0.5] * 3, 1.0)


def test_a_rewound_row_is_ready_again(run: str) -> None:
    table = ExperienceTable(run)
    table.rewind(2)
    table.close()
    rows = Experience(run).query("select state, trained_step from experience where group_id = 'trained'").to_pylist()
    assert rows == [{"state": "ready", "trained_step": None}] * 2


def test_frames_and_heads_are_the_same_rows(run: str) -> None:
    assert len(Experience(run).to_pandas()) == 7
    assert len(Experience(run).head(2)) == 2


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("selec 1", 'SQL: Parser Error: syntax error at or near "selec"'),
        ("select rewrd from experience", 'SQL: Binder Error: Referenced column "rewrd" not found'),
        ("select * from other", "SQL: Catalog Error: Table with name other does not exist"),
        ("", "give one select statement, not ''"),
        ("select 1; select 2", "give one select statement"),
        ("delete from experience", "experience is read only: give one select statement, not 'delete from experience'"),
        ("create table t as select 1", "experience is read only"),
        ("copy experience to 'stolen.csv'", "experience is read only"),
        ("select * from read_text('/etc/hostname')", "SQL: Permission Error: Cannot access file"),
        ("select * from run", "SQL: Catalog Error: Table with name run does not exist"),
        ("select cast(replica || 'x' as int) from experience", "SQL: Conversion Error"),
    ],
)
def test_bad_sql_and_anything_but_reading_is_one_line(run: str, sql: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        Experience(run).query(sql)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no experience at .*: give the folder of a run that has begun"):
        Experience(str(tmp_path)).query("select 1")


def test_a_run_without_a_trajectory_has_no_rows(tmp_path: Path) -> None:
    ExperienceTable(str(tmp_path)).close()
    assert Experience(str(tmp_path)).to_arrow().num_rows == 0


def test_a_run_in_an_object_store_reads_the_same(tmp_path: Path) -> None:
    table = ExperienceTable(f"memory://{tmp_path.name}", compact_after=2)
    for number in range(5):
        table.append(group(f"g{number}"))
    table.close()
    assert Experience(table.url).query("select sum(reward) as total from experience")["total"].to_pylist() == [5.0]


def test_beside_a_writer_a_reader_sees_all_that_was_acknowledged_and_nothing_half(tmp_path: Path) -> None:
    check = (
        "select count(*) as n, count(distinct trajectory_id) as ids, min(len(response_ids)) as least from experience"
    )
    queries, appended, last = 0, 0, ""
    with writer(str(tmp_path), first=0, groups=60) as (_, acknowledged):
        while last != "closed":
            assert acknowledged.poll(30), "the writer is silent"
            while last != "closed" and acknowledged.poll(0):
                last, names = acknowledged.recv()
                appended += len(names) if last == "appended" else 0
            (seen,) = Experience(str(tmp_path)).query(check).to_pylist()
            assert seen["n"] == seen["ids"] >= appended
            assert seen["least"] in (50, None)
            queries += 1
    assert (appended, seen["n"]) == (120, 120)
    assert queries >= 3


def test_head_and_the_notebook_view_show_text_for_people(tmp_path: Path) -> None:
    table = ExperienceTable(str(tmp_path))
    table.append(group("g0", prompt_text="Is 1 < 2?", response_text="yes & " + "no " * 100))
    table.close()
    head = Experience(str(tmp_path)).head(1)
    assert (head["prompt_text"][0], head["state"][0], head["reward"][0]) == ("Is 1 < 2?", "ready", 0.0)
    shown = Experience(str(tmp_path))._repr_html_()
    assert "2 ready" in shown and "Is 1 &lt; 2?" in shown and "yes &amp; no" in shown


def test_polars_has_the_same_rows_or_says_how_to_get_it(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pytest.importorskip("polars").DataFrame
    found = Experience(run).to_polars()
    assert isinstance(found, frame) and found.shape[0] == 7
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UserError, match=r"polars is not installed: `pip install polars`, or use to_pandas\(\)"):
        Experience(run).to_polars()


def test_a_query_of_scalars_reads_neither_tokens_nor_the_life_log(run: str) -> None:
    with connect(Store(f"{run}/experience")) as connection:
        sql = "explain select reward, weight_version, count(*) from experience group by all"
        text = "".join(line for _, line in connection.sql(sql).fetchall())
    assert "JOIN" not in text and "response_ids" not in text
