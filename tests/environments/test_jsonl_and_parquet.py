"""Data sets from files: what a row becomes, and one clear line for everything that can be wrong with a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.environments import Dataset, dataset
from laminar.errors import UserError
from laminar.trajectory import Score

ROWS: list[dict[str, Any]] = [{"question": f"{n}+1=", "answer": str(n + 1), "day": "2024-01-01"} for n in range(3)]


def jsonl(folder: Path, *lines: object, name: str = "sums.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "sums.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def fails(environment: Dataset) -> str:
    """The one line of the UserError with which ``check`` ends before it starts any process."""
    with pytest.raises(UserError) as raised:
        environment.check()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json-lines", "json-list", "parquet"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path, kind: str) -> None:
    path = {
        "jsonl": lambda: jsonl(tmp_path, *ROWS, ""),
        "ndjson": lambda: jsonl(tmp_path, *ROWS, name="sums.ndjson"),
        "json-lines": lambda: jsonl(tmp_path, *ROWS, name="sums.json"),
        "json-list": lambda: jsonl(tmp_path, json.dumps(ROWS, indent=1), name="sums.json"),
        "parquet": lambda: parquet(tmp_path, ROWS),
    }[kind]()
    sums = dataset(path, prompt="question")
    assert len(sums) == 3
    prompt = sums.prompt(2)
    assert (prompt.id, prompt.text, prompt.row) == ("sums-2", "2+1=", ROWS[2])
    assert sums.score(prompt, "<answer>3</answer>") == Score(reward=1.0)
    assert sums.score(prompt, "4").reward == 0.0


def test_a_file_may_begin_with_a_byte_order_mark_and_have_empty_lines(tmp_path: Path) -> None:
    lines = "\r\n\r\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "sums.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n  \r\n")
    assert [dataset(tmp_path / "sums.jsonl", prompt="question").prompt(n).row for n in range(3)] == ROWS


def test_a_file_is_read_through_any_filesystem(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://data/sums.jsonl", "wb") as file:
        file.write(jsonl(tmp_path, *ROWS).read_bytes())
    assert dataset("memory://data/sums.jsonl", prompt="question").prompt(0).text == "0+1="


def test_two_tasks_with_the_same_text_stay_apart(tmp_path: Path) -> None:
    """NeMo-RL PR #3882."""
    twice = dataset(jsonl(tmp_path, {"prompt": "x", "answer": 1}, {"prompt": "x", "answer": 2}))
    first, second = twice.prompt(0), twice.prompt(1)
    assert first.text == second.text
    assert first.id != second.id
    assert twice.score(first, "1").reward == 1.0
    assert twice.score(second, "1").reward == 0.0


def test_a_column_that_is_not_there_is_told_with_the_one_to_use(tmp_path: Path) -> None:
    """verl #758: a KeyError, late in the run."""
    path = parquet(tmp_path, ROWS)
    message = fails(dataset(path))
    assert message.endswith(
        "has no column 'prompt'; it has question, answer, day; say which one to use: prompt=\"question\""
    )
    assert fails(dataset(path, prompt="questoin")).endswith('prompt="question"')
    assert fails(dataset(path, prompt="question", answer="result")).endswith(
        "has no column 'result'; it has question, answer, day; say which one to use: answer=\"answer\""
    )


def test_a_reward_that_needs_no_answer_needs_no_answer_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "say something short"})
    short = dataset(path, reward=lambda response: -len(response))
    assert short.score(short.prompt(0), "four").reward == -4.0
    assert "has no column 'answer'" in fails(dataset(path))


def test_an_unknown_parameter_of_the_reward_is_told_before_it_is_called(tmp_path: Path) -> None:
    def my_reward(response: str, anwser: str) -> float:
        return 0.0

    message = fails(dataset(jsonl(tmp_path, *ROWS), prompt="question", reward=my_reward))
    assert "reward `my_reward` has a parameter 'anwser'" in message
    assert "did you mean 'answer'?" in message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty; expected at least one row"),
        (['{"prompt": "a", "answer": 1}', "", '{"prompt": "b"'], r"line 3: broken JSON \(Expecting ',' delimiter"),
        (['{"prompt": "a", "answer": 1}', "[1]"], "line 2: expected a JSON object, got list"),
        ([{"prompt": "a", "answer": 1}, {"answer": 2}], "row 2: column 'prompt' holds nothing; expected"),
        ([{"prompt": 5, "answer": 1}], "row 1: column 'prompt' holds a int; expected the prompt as text"),
        (
            [{"prompt": [{"role": "user", "content": "a"}], "answer": 1}],
            "row 1: column 'prompt' holds a list; expected",
        ),
        ([{"prompt": "  ", "answer": 1}], "row 1: column 'prompt' is empty; expected"),
        (['{"prompt": "ab\\ud800", "answer": 1}'], r"row 1: column 'prompt' has half a character \('\\ud800' at 2\)"),
        (['{"prompt": "a", "answer": ' + "[" * 100_000], r"line 1: JSON that cannot be read \(maximum recursion"),
        (['{"prompt": "a", "answer": ' + "1" * 5000 + "}"], r"line 1: JSON that cannot be read \(Exceeds the limit"),
    ],
)
def test_a_broken_file_is_told_with_the_place(tmp_path: Path, lines: list[object], message: str) -> None:
    assert re.search(message, fails(dataset(jsonl(tmp_path, *lines))))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert fails(dataset(tmp_path / "none.jsonl")).endswith("none.jsonl: no such file")
    assert "cannot be read" in fails(dataset("nothing-like-that://a/b.jsonl"))
    (tmp_path / "a.jsonl").mkdir()
    assert "cannot be read" in fails(dataset(tmp_path / "a.jsonl"))
    (tmp_path / "b.parquet").write_bytes(b"not parquet")
    assert "is no valid Parquet file" in fails(dataset(tmp_path / "b.parquet"))
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    assert "line 2: not UTF-8 text" in fails(dataset(tmp_path / "c.jsonl"))
    (tmp_path / "one.json").write_text(json.dumps({"data": ROWS}, indent=1))
    assert "one.json is one JSON object; expected a list of objects, or" in fails(dataset(tmp_path / "one.json"))
    (tmp_path / "d.json").write_text('[{"prompt": "a"},\n{"prompt" "b"}]')
    assert "line 2: broken JSON" in fails(dataset(tmp_path / "d.json"))


def test_parquet_that_python_cannot_hold_is_told(tmp_path: Path) -> None:
    half = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    far = pa.array([2**62], pa.timestamp("us"))
    for column, message in ((half, "can't decode byte 0xff"), (far, "date value out of range")):
        pq.write_table(pa.table({"prompt": ["a"], "answer": column}), tmp_path / "a.parquet")
        assert message in fails(dataset(tmp_path / "a.parquet"))


def test_nested_columns_of_parquet_reach_the_reward_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": {"steps": [1, 2], "unit": {"name": "m"}}, "raw": b"\xff", "sums": [1.5, None]}
    found = dataset(
        parquet(tmp_path, [row]), reward=lambda answer, row: answer["steps"][1] + (row["sums"] == [1.5, None])
    )
    found.check()
    assert found.prompt(0).row == row
    assert found.score(found.prompt(0), "").reward == 3.0


def test_what_the_driver_of_a_remote_store_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        """As botocore has it: no OSError."""

    def cannot(*args: object, **options: object) -> None:
        raise NoCredentials("no credentials\nfound")

    monkeypatch.setattr("fsspec.open", cannot)
    assert fails(dataset("s3://lab/a.jsonl")).endswith("s3://lab/a.jsonl cannot be read: no credentials found")


def test_an_unknown_kind_of_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sums.csv: expected a file that ends with one of .jsonl, .ndjson, .json"):
        dataset("sums.csv")


def test_it_travels_as_its_url_and_reads_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path, *ROWS * 1000)
    monkeypatch.chdir(tmp_path)
    sums = dataset("sums.jsonl", prompt="question", reward=lambda response: 1.0)
    before = sums.prompt(1)
    packed = cloudpickle.dumps(sums)
    monkeypatch.chdir("/")
    assert len(packed) < 5000
    assert cloudpickle.loads(packed).prompt(1) == before
    assert cloudpickle.loads(packed).fingerprint() == sums.fingerprint()


def test_fingerprints_follow_content_columns_and_reward_but_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    here = dataset(jsonl(tmp_path, *ROWS), prompt="question")
    assert dataset(jsonl(tmp_path / "copy", *ROWS), prompt="question").fingerprint() == here.fingerprint()
    others = [
        here,
        dataset(here.url, prompt="day"),
        dataset(here.url, prompt="question", reward=lambda response: 1.0),
        dataset(here.url, prompt="question", reward=lambda response: 2.0),
        dataset(jsonl(tmp_path, *ROWS[:2], name="two.jsonl"), prompt="question"),
    ]
    assert len({other.fingerprint() for other in others}) == len(others)
