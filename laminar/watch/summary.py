"""The numbers that a run ends with, computed from its metrics. Pure: tables in, a dict out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from laminar.watch.busy import busy_fraction

__all__ = [
    "Rows",
    "Summary",
    "quarter_means",
    "rows_of",
    "summarise",
    "surviving",
]

Rows: TypeAlias = pa.Table | Sequence[Mapping[str, Any]] | None
Summary: TypeAlias = dict[str, int | float | None]


def summarise(
    steps: Rows,
    evaluations: Rows = None,
    replicas: Rows = None,
    *,
    dropped: int | None = None,
    versions_per_trajectory_max: int | None = None,
) -> Summary:
    """What a run did. A number that the metrics do not give is None.

    Parameters
    ----------
    steps, evaluations, replicas
        Rows of these kinds (columns: see ``laminar.watch.metrics``).
    dropped
        Trajectories dropped at append, from the experience table.
    versions_per_trajectory_max
        The most weight versions that generated one trajectory, from the experience table; otherwise the
        largest value in ``steps``.

    Example
    -------
    >>> steps = [{"step": n, "reward_mean": n / 10, "rows": 8} for n in range(1, 9)]
    >>> held_out = [{"step": 0, "reward_mean": 0.1}, {"step": 8, "reward_mean": 0.7, "greedy_accuracy": 0.8}]
    >>> result = summarise(steps, held_out)
    >>> result["steps"], result["trajectories"], result["eval_before"], result["eval_after"]
    (8, 64, 0.1, 0.7)
    >>> round(result["reward_first_quarter"], 3), round(result["reward_last_quarter"], 3)
    (0.15, 0.75)
    """
    done = surviving(steps)
    first, last = quarter_means(_values(done, "reward_mean"))
    before, after = _before_and_after(rows_of(evaluations))
    versions = _largest(_values(done, "versions_per_trajectory_max"))
    return {
        "steps": len(done),
        "trajectories": int(sum(_values(done, "rows"))),
        "reward_first_quarter": first,
        "reward_last_quarter": last,
        "eval_before": before.get("reward_mean"),
        "eval_after": after.get("reward_mean"),
        "eval_greedy_before": before.get("greedy_accuracy"),
        "eval_greedy_after": after.get("greedy_accuracy"),
        "tokens_per_second": _mean(_values(done, "tokens_per_second")),
        "trainer_wait_fraction": _trainer_wait_fraction(done),
        "rollout_busy_fraction": busy_fraction(replicas),
        "staleness_mean": _weighted_mean(done, "staleness_mean", weight="rows"),
        "staleness_max": _whole(_largest(_values(done, "staleness_max"))),
        "versions_per_trajectory_max": _whole(
            versions if versions_per_trajectory_max is None else versions_per_trajectory_max
        ),
        "dropped": dropped,
    }


def rows_of(rows: Rows) -> list[dict[str, Any]]:
    """Rows as dicts, whatever they came as; None is no rows."""
    if rows is None:
        return []
    return list(rows.to_pylist()) if isinstance(rows, pa.Table) else [dict(row) for row in rows]


def surviving(steps: Rows) -> list[dict[str, Any]]:
    """The step rows of the history that counts, in order.

    A trainer that came back from an older checkpoint does steps again; the rows that it had written for them
    before are superseded.

    Example
    -------
    >>> [(row["step"], row["loss"]) for row in surviving([
    ...     {"step": 1, "loss": 3}, {"step": 2, "loss": 2}, {"step": 3, "loss": 9}, {"step": 2, "loss": 1},
    ... ])]
    [(1, 3), (2, 1)]
    """
    kept: list[dict[str, Any]] = []
    for row in rows_of(steps):
        while kept and row.get("step") is not None and kept[-1]["step"] >= row["step"]:
            kept.pop()
        if row.get("step") is not None:
            kept.append(row)
    return kept


def quarter_means(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Means of the first and of the last quarter: a quarter of the values, rounded down, at least one.

    Example
    -------
    >>> quarter_means([0.0, 0.2, 0.4, 0.6, 0.5, 0.5, 0.8, 1.0])
    (0.1, 0.9)
    >>> quarter_means([0.25]), quarter_means([])
    ((0.25, 0.25), (None, None))
    """
    size = max(1, len(values) // 4)
    return _mean(values[:size]), _mean(values[-size:])


def _before_and_after(evaluations: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The evaluation of the untrained policy, and the last one of the furthest trained policy."""
    rows = [row for row in evaluations if row.get("step") is not None]
    before = next((row for row in rows if row["step"] == 0), {})
    trained = [row for row in rows if row["step"] > 0]
    return before, max(reversed(trained), key=lambda row: int(row["step"]), default={})


def _trainer_wait_fraction(steps: list[dict[str, Any]]) -> float | None:
    """Seconds waited, of seconds waited and worked; without seconds, the mean of the steps' shares."""
    rows = [row for row in steps if _is_number(row.get("wait_seconds")) and _is_number(row.get("seconds"))]
    if not rows:
        return _mean(_values(steps, "trainer_wait_fraction"))
    waited, worked = sum(_values(rows, "wait_seconds")), sum(_values(rows, "seconds"))
    return waited / (waited + worked) if waited + worked > 0 else None


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The numbers of one column, in order; missing ones and NaN left out."""
    return [row[name] for row in rows if _is_number(row.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _weighted_mean(rows: Sequence[Mapping[str, Any]], name: str, *, weight: str) -> float | None:
    pairs = [(row[name], row.get(weight) or 0) for row in rows if _is_number(row.get(name))]
    total = sum(share for _, share in pairs)
    return sum(value * share for value, share in pairs) / total if total else _mean([v for v, _ in pairs])


def _largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
