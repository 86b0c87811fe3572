"""``laminar-flow query`` and ``tail``: a run's trajectories at a terminal."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from laminar.cli.app import run_app
from laminar.experience.table import ExperienceTable
from laminar.flow.record import ending
from tests.experience.rows import batch, group, one


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has ended, with a group of two, and one row that could not be scored."""
    folder = tmp_path / "flow" / "r1"
    folder.mkdir(parents=True)
    record = {"run_id": "r1", "flow": "flow", "parameters": {}, "status": "finished", "pid": 1, "host": "elsewhere"}
    record |= {"started": 1.0}
    (folder / "run.json").write_text(json.dumps(record))
    table = ExperienceTable(str(folder))
    table.append(group("g0", finished_at=100.0, prompt_text="1 + 1 =", response_text=" it is\n 2"))
    table.append(batch(one("g1", 0, finished_at=101.0, drop_reason="reward_error", message="no number")))
    table.close()
    return folder


def test_csv_has_one_line_a_row_with_lists_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select trajectory_id, response_ids, reward from experience order by trajectory_id"
    assert run_app(["query", str(run), sql, "--csv"]) == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["trajectory_id", "response_ids", "reward"],
        ["g0-0", "[10, 10, 10]", "0.0"],
        ["g0-1", "[11, 11, 11]", "1.0"],
        ["g1-0", "[10, 10, 10]", ""],
    ]


def test_json_has_numbers_where_the_answer_has(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """DuckDB sums integers with 128 bits, which Arrow has as decimals only."""
    sql = "select sum(len(response_ids)) as tokens, cast(0.25 as decimal(4, 2)) as part from experience"
    assert run_app(["query", str(run), sql, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == [{"tokens": 9, "part": 0.25}]


def test_parquet_has_the_answer_and_says_where(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answer.parquet"
    assert run_app(["query", str(run), "select * from experience", "--parquet", str(file)]) == 0
    assert capsys.readouterr().out == f"3 rows in {file}\n"
    assert pq.read_table(file).num_rows == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--csv", "--json"], "give one of them"), (["--parquet", "/proc/nowhere/x"], "cannot write /proc/nowhere/x: ")],
)
def test_what_cannot_be_written_is_one_line(
    run: Path, capfd: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    assert run_app(["query", str(run), "select 1", *options]) == 2
    captured = capfd.readouterr()
    assert why in captured.out + captured.err


def test_tail_shows_the_last_trajectories_with_text_and_reward(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["tail", str(run), "-n", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "g0-1  reward 1  version 0  stop",
        "  1 + 1 =",
        "  > it is 2",
        "g1-0  reward_error: no number  version 0  stop",
        "  ",
        "  > ",
    ]


def test_tail_follows_a_run_and_ends_with_it(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from laminar.cli import tail

    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "running"}))
    looks = iter(range(10))

    def next_moment(seconds: float) -> None:
        if next(looks) == 0:
            table = ExperienceTable(str(run))
            table.append(group("g2", finished_at=99.0, response_text="late"))
            table.close()
        else:
            (run / "run.json").write_text(json.dumps(record | ending("finished", 1.0, None)))

    monkeypatch.setattr(tail.time, "sleep", next_moment)
    codes: list[int] = []
    follower = threading.Thread(target=lambda: codes.append(run_app(["tail", str(run), "-n", "0"])), daemon=True)
    follower.start()
    follower.join(30)
    assert codes == [0]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("g")] == [
        "g2-0  reward 0  version 0  stop",
        "g2-1  reward 1  version 0  stop",
    ]
