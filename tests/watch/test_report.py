"""The report is one file that needs nothing else, whatever the run left behind."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from laminar.errors import UserError
from laminar.experience.schema import record_batch, row
from laminar.experience.table import ExperienceTable
from laminar.watch.metrics import MetricsWriter
from laminar.watch.report import write_report

STEP = {
    "rows": 8,
    "staleness_mean": 1.0,
    "staleness_max": 2,
    "seconds": 1.0,
    "wait_seconds": 0.5,
    "tokens_per_second": 900.0,
    "importance_ratio_mean": 1.0,
}
ROW = {
    "group_id": "g000000",
    "prompt_id": "p-0",
    "group_size": 2,
    "weight_version": 0,
    "finish_version": 0,
    "prompt_ids": [1],
    "response_ids": [2, 3],
    "logprobs": [-0.1, -0.2],
    "finish_reason": "stop",
}


class Tags(HTMLParser):
    """Counts tags and fails on one that is not closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def write_metrics(run: Path, steps: int) -> None:
    writer = MetricsWriter(str(run))
    for step in range(1, steps + 1):
        writer.write("steps", {"step": step, "reward_mean": step / 10, "loss": 0.1, **STEP})
        writer.write("replicas", {"time": float(step), "name": "rollout-0", "running": step % 3})
    writer.write("evaluations", {"step": 0, "reward_mean": 0.1, "greedy_accuracy": 0.2})
    writer.write("evaluations", {"step": steps, "reward_mean": 0.5, "greedy_accuracy": 0.6})
    writer.close()


def write_experience(run: Path, response: str, prompt: str = "1 + 1 =") -> None:
    table = ExperienceTable(str(run))
    rows = [
        row(
            trajectory_id=f"g000000-{sample}",
            sample=sample,
            reward=float(sample),
            response_text=response,
            prompt_text=prompt,
            **ROW,
        )
        for sample in range(2)
    ]
    table.append(record_batch(rows))
    table.close()


def test_a_run_that_did_nothing_still_has_a_report(tmp_path: Path) -> None:
    url = write_report(str(tmp_path))
    assert url == f"{tmp_path}/report.html"
    document = Path(url).read_text()
    Tags(document)
    assert "No step was done." in document
    assert "not finished, 0 steps" in document


def test_a_full_run_has_its_curves_numbers_samples_and_parameters(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "quickstart-1", "parameters": {"lr": 5e-5}}))
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "eval_before": 0.1, "eval_after": 0.5}))
    write_metrics(tmp_path, steps=12)
    write_experience(tmp_path, response="<script>alert(1)</script> 2")
    document = Path(write_report(str(tmp_path))).read_text()
    tags = Tags(document)
    for title in (
        "Reward",
        "Staleness (versions)",
        "Importance ratio",
        "The trainer (seconds a step)",
        "Replicas",
    ):
        assert f"<b>{title}" in document
    assert tags.seen.count("circle") == 4
    assert "finished, 12 steps" in document
    assert "0.100 → 0.500" in document
    assert "parameters.lr" in document and "5e-05" in document
    assert "reward 1.000, version 0" in document and "reward 0.000, version 0" in document
    assert "script" not in tags.seen and "&lt;script&gt;alert(1)" in document


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    (tmp_path / "run.json").write_text(json.dumps({"flow": bad, "run_id": bad, "status": bad, bad: {bad: bad}}))
    write_experience(tmp_path, response=bad, prompt=bad)
    document = Path(write_report(str(tmp_path))).read_text()
    assert "script" not in Tags(document).seen
    assert document.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 8


def test_a_report_fetches_nothing(tmp_path: Path) -> None:
    write_metrics(tmp_path, steps=3)
    document = Path(write_report(str(tmp_path))).read_text()
    assert not re.search(r"https?://|<link|<script|@import|url\(|src=", document)


def test_a_long_run_does_not_make_a_huge_file(tmp_path: Path) -> None:
    write_metrics(tmp_path, steps=3000)
    assert Path(write_report(str(tmp_path))).stat().st_size < 500_000


def test_a_run_of_one_step_or_with_half_its_columns_is_drawn(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    writer.write("steps", {"step": 1, "reward_mean": 0.5, "loss": float("nan")})
    writer.close()
    document = Path(write_report(str(tmp_path))).read_text()
    Tags(document)
    assert "<b>Reward" in document and "<b>Loss" not in document


def test_a_broken_run_json_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json is not JSON"):
        write_report(str(tmp_path))
