"""What an emulated engine's requests are like: lengths, tool waits and step latencies, from measured quantiles. Pure.

Everything about a trajectory follows from the seed and its id, so that it is the same wherever it runs.
"""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import NormalDist

from laminar.errors import UserError
from laminar.rollout.latency import StepCurve

__all__ = ["Quantiles", "Workload", "lengths_from_parquet", "response_tokens", "sandbox_seconds", "step_curve"]

LOWEST = 0.4
"""The smallest value, as a share of the 10th percentile: the tables begin there."""


def _table(name: str) -> list[dict[str, str]]:
    with files("laminar").joinpath(f"data/{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Quantiles:
    """A distribution by its quantiles, with straight lines on a log scale between them.

    >>> round(Quantiles((0.0, 0.5, 1.0), (1.0, 10.0, 1000.0)).value(0.75))
    100
    """

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def value(self, level: float) -> float:
        """The quantile at ``level``, 0 to 1."""
        high = min(len(self.levels) - 1, max(1, bisect_right(self.levels, level)))
        low = high - 1
        share = (level - self.levels[low]) / (self.levels[high] - self.levels[low])
        ratio = self.values[high] / self.values[low]
        return float(self.values[low] * ratio ** min(1.0, max(0.0, share)))


def _quantiles(row: dict[str, str]) -> Quantiles:
    known = [(int(name[1:]) / 100, float(value)) for name, value in row.items() if name[0] == "p"]
    levels, values = zip(*sorted(known), strict=True)
    return Quantiles((0.0, *levels, 1.0), (LOWEST * values[0], *values, float(row["max"])))


def response_tokens(workload: str) -> Quantiles:
    """Response lengths of a workload of the paper's evaluation (``data/response_tokens.csv``).

    Raises
    ------
    UserError
        There is no such workload; the message names those that are.
    """
    rows = {row["workload"]: row for row in _table("response_tokens")}
    if workload not in rows:
        raise UserError(f"unknown workload {workload!r}; known: {', '.join(rows)}")
    return _quantiles({name: value for name, value in rows[workload].items() if name != "workload"})


def sandbox_seconds() -> Quantiles:
    """How long a tool takes to answer (``data/sandbox_seconds.csv``)."""
    return _quantiles(_table("sandbox_seconds")[0])


def lengths_from_parquet(url: str) -> Quantiles:
    """Lengths of a user's own: column ``tokens`` of a Parquet file, or its only column.

    Raises
    ------
    UserError
        No such file or column, or no positive lengths in it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(url)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"lengths {url!r} cannot be read as Parquet: {' '.join(str(error).split())}") from error
    name = "tokens" if "tokens" in table.column_names else table.column_names[0]
    if name != "tokens" and len(table.column_names) > 1:
        raise UserError(f"lengths {url!r} has the columns {', '.join(table.column_names)}; expected one named `tokens`")
    values = sorted(float(value) for value in table[name].to_pylist() if value and value > 0)
    if len(values) < 2:
        raise UserError(f"lengths {url!r} has {len(values)} positive values in `{name}`; expected at least 2")
    return Quantiles(tuple(i / (len(values) - 1) for i in range(len(values))), tuple(values))


def step_curve(model: str, tensor_parallel: int) -> StepCurve:
    """Seconds of a decode step by batch (``data/decode_latency.csv``).

    Raises
    ------
    UserError
        It was not measured; the message names what was.
    """
    rows = _table("decode_latency")
    points = tuple(
        (float(row["batch"]), float(row["milliseconds_per_step"]) / 1000)
        for row in rows
        if row["model"] == model and int(row["tensor_parallel"]) == tensor_parallel
    )
    if not points:
        known = sorted({f"{row['model']} TP{row['tensor_parallel']}" for row in rows})
        raise UserError(f"no decode latencies of {model} TP{tensor_parallel}; known: {', '.join(known)}")
    return StepCurve(points)


@dataclass(frozen=True)
class Workload:
    """Draws what a trajectory will be like.

    Parameters
    ----------
    lengths
        Tokens of a response.
    group_correlation
        How alike the siblings of a group are, 0 to 1; the distribution as a whole stays as it is.
    tool_calls
        Most tool calls of a trajectory; each makes 0 to so many, spread over the response.
    tool_seconds
        How long one takes.
    """

    lengths: Quantiles
    seed: int = 0
    group_correlation: float = 0.0
    tool_calls: int = 0
    tool_seconds: Quantiles | None = None

    def length(self, trajectory: str, cap: int) -> int:
        """Tokens of the response of trajectory ``<group>-<sample>``."""
        normal = NormalDist()
        own = normal.inv_cdf(_uniform(self.seed, "length", trajectory))
        shared = normal.inv_cdf(_uniform(self.seed, "group", trajectory.rpartition("-")[0]))
        alike = self.group_correlation
        level = normal.cdf(math.sqrt(alike) * shared + math.sqrt(1 - alike) * own)
        return min(cap, max(1, round(self.lengths.value(level))))

    def tools(self, trajectory: str, length: int) -> tuple[tuple[int, float], ...]:
        """``(tokens, seconds)`` of its tool calls, in order."""
        if not self.tool_calls or self.tool_seconds is None:
            return ()
        draw = random.Random(f"{self.seed} tools {trajectory}")
        at: Sequence[int] = sorted(
            {draw.randrange(1, length) for _ in range(draw.randint(0, self.tool_calls))} if length > 1 else ()
        )
        return tuple((tokens, self.tool_seconds.value(draw.random())) for tokens in at)


def _uniform(seed: int, what: str, name: str) -> float:
    return min(1 - 1e-12, max(1e-12, random.Random(f"{seed} {what} {name}").random()))
