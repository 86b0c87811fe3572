"""``report.html`` of a run, from its files alone: curves, headline numbers, samples, parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from laminar.errors import UserError
from laminar.experience.store import Store
from laminar.watch.busy import busy_spans, busy_windows
from laminar.watch.charts import Point, Series, line_chart, strips
from laminar.watch.metrics import read_metrics
from laminar.watch.page import definition_table, page, sample, section, tiles
from laminar.watch.summary import rows_of, summarise, surviving
from laminar.watch.view import shown, whole

__all__ = ["write_report"]

Row = dict[str, Any]

_WINDOWS = 60
_MOST_TEXT = 2000
_SAMPLES = """
    select prompt_text, response_text, reward, weight_version, finish_reason, len(response_ids) as tokens
    from experience where reward is not null order by reward {order}, finished_at desc limit 3
"""


def write_report(run_url: str) -> str:
    """Write ``report.html`` into the run's folder and return its URL.

    Whatever the run has not written (it stopped early, it is still going on) is left out.

    Raises
    ------
    UserError
        When ``run.json`` or ``summary.json`` is there but is not JSON.
    """
    store = Store(run_url)
    run = _read_json(store, "run.json")
    steps = surviving(read_metrics(run_url, "steps"))
    evaluations = rows_of(read_metrics(run_url, "evaluations"))
    replicas = read_metrics(run_url, "replicas")
    summary = _read_json(store, "summary.json") or summarise(steps, evaluations, replicas)
    samples, why_none = _samples(run_url)
    title = " ".join(str(run[name]) for name in ("flow", "run_id") if name in run) or store.url.rsplit("/", 1)[-1]
    document = page(
        title,
        f"{summary.get('status', run.get('status', 'not finished'))}, {len(steps)} steps",
        [
            tiles(_headline(summary)),
            section("Learning", _learning(steps, evaluations), empty="No step was done."),
            section("Pace", _pace(steps, replicas)),
            section("Sample trajectories", samples, empty=why_none),
            section("All numbers", [definition_table("results", summary), definition_table("run", run)]),
        ],
    )
    store.write("report.html", pa.py_buffer(document.encode()))
    return f"{store.url}/report.html"


def _read_json(store: Store, name: str) -> Row:
    """A JSON object of the run's folder; empty if the file is not there."""
    try:
        value = json.loads(store.read(name).to_pybytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{store.url}/{name} is not JSON ({error}); expected the file that a run writes") from error
    return dict(value)


def _headline(summary: Row) -> list[tuple[str, str]]:
    def change(before: str, after: str) -> str:
        return f"{shown(summary.get(before))} → {shown(summary.get(after))}"

    return [
        ("training reward, first → last quarter", change("reward_first_quarter", "reward_last_quarter")),
        ("held-out reward", change("eval_before", "eval_after")),
        ("held-out greedy accuracy", change("eval_greedy_before", "eval_greedy_after")),
        ("tokens per second", whole(summary.get("tokens_per_second"))),
        (
            "staleness, mean / highest",
            f"{shown(summary.get('staleness_mean'), 2)} / {whole(summary.get('staleness_max'))}",
        ),
        ("trainer waited", _percent(summary.get("trainer_wait_fraction"))),
        ("replicas generated", _percent(summary.get("rollout_busy_fraction"))),
        ("trajectories", whole(summary.get("trajectories"))),
    ]


def _learning(steps: Sequence[Row], evaluations: Sequence[Row]) -> list[str]:
    held_out = sorted(evaluations, key=lambda row: row.get("step") or 0)
    reward = [
        Series("training", _points(steps, "reward_mean")),
        Series("held-out", _points(held_out, "reward_mean"), dots=True),
        Series("held-out greedy", _points(held_out, "greedy_accuracy"), dots=True),
    ]
    lengths = [Series("mean", _points(steps, "response_length_mean"))]
    lengths.append(Series("longest", _points(steps, "response_length_max")))
    ratio = [Series("mean", _points(steps, "importance_ratio_mean"))]
    ratio.append(Series("highest", _points(steps, "importance_ratio_max")))
    return [
        line_chart("Reward", reward),
        line_chart("Response length (tokens)", lengths, zero=True),
        line_chart("Importance ratio", ratio),
        _single("KL, engine against trainer", steps, "kl"),
        _single("Entropy (nats a token)", steps, "entropy"),
        _single("Loss", steps, "loss"),
        _single("Gradient norm", steps, "grad_norm", zero=True),
        line_chart(
            "Share of tokens",
            [
                Series("clipped", _points(steps, "clip_fraction")),
                Series("truncated", _points(steps, "truncated_fraction")),
            ],
            zero=True,
        ),
    ]


def _pace(steps: Sequence[Row], replicas: pa.Table) -> list[str]:
    staleness = [
        Series("mean", _points(steps, "staleness_mean")),
        Series("highest", _points(steps, "staleness_max")),
    ]
    seconds = [Series("works", _points(steps, "seconds")), Series("waits", _points(steps, "wait_seconds"))]
    spans = busy_spans(replicas)
    busy, busy_seconds = busy_windows(spans, min(_WINDOWS, max(map(len, spans.values()), default=1) or 1))
    return [
        line_chart("Staleness (versions)", staleness, zero=True),
        _single("Tokens per second, all replicas", steps, "tokens_per_second", zero=True),
        line_chart("The trainer (seconds a step)", seconds, zero=True),
        strips("Replicas: share of time generating", busy, x_label="minutes", x_end=busy_seconds / 60),
    ]


def _samples(run_url: str) -> tuple[list[str], str]:
    """The best and the worst answers, newest first among equals; why there are none."""
    from laminar.experience.reader import Experience

    experience = Experience(run_url)
    try:
        tables = [experience.query(_SAMPLES.format(order=order)) for order in ("desc", "asc")]
    except UserError as error:
        return [], str(error)
    rows = [row for table in tables for row in table.to_pylist()]
    cards = [
        sample(
            f"reward {shown(row['reward'])}, version {row['weight_version']}, {row['tokens']} tokens, "
            f"{row['finish_reason']}",
            str(row["prompt_text"])[:_MOST_TEXT],
            str(row["response_text"])[:_MOST_TEXT],
        )
        for row in rows
    ]
    return cards, "None was scored."


def _single(title: str, steps: Sequence[Row], column: str, *, zero: bool = False) -> str:
    return line_chart(title, [Series(title, _points(steps, column))], zero=zero)


def _points(rows: Sequence[Row], column: str) -> list[Point]:
    """(step, value) where the value is a number."""
    known = ((row["step"], row.get(column)) for row in rows if row.get("step") is not None)
    return [(float(step), float(value)) for step, value in known if value is not None and math.isfinite(value)]


def _percent(share: Any) -> str:
    return shown(share * 100, 0, " %") if isinstance(share, (int, float)) else "-"
