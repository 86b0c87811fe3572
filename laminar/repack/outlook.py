"""What a batch has still to do, as curves over the tokens to come; curves of two replicas add up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar.repack.loads import Load
from laminar.rollout.latency import StepCurve
from laminar.rollout.lengths import Survival

__all__ = ["Outlook", "curves", "drain_seconds", "hindsight", "log_none"]

Numbers = npt.NDArray[np.float64]

GRID = 20
"""Points of a curve, closer where fewer tokens are to come."""


@dataclass
class Outlook:
    """At each point of the grid of tokens still to come: expected trajectories alive, log of the probability that
    none is, expected KV in tokens. One replica, or several as rows."""

    alive: Numbers
    none: Numbers
    kv: Numbers

    def row(self, index: int) -> Outlook:
        """One replica of several."""
        return Outlook(self.alive[index], self.none[index], self.kv[index])

    def plus(self, other: Outlook) -> Outlook:
        """Both loads together."""
        return Outlook(self.alive + other.alive, self.none + other.none, self.kv + other.kv)

    def put(self, index: int, row: Outlook) -> None:
        """Replace one replica of several."""
        self.alive[index], self.none[index], self.kv[index] = row.alive, row.none, row.kv

    def seconds(self, curve: StepCurve, grid: Numbers) -> Numbers:
        """Expected seconds until the last trajectory is done."""
        some = -np.expm1(self.none)
        batch = self.alive / np.maximum(some, 1e-12)
        return np.asarray(np.trapezoid(curve.seconds(np.maximum(batch, 1.0)) * some, grid, axis=-1))


def curves(loads: Sequence[Load], cap: int, survival: Survival) -> tuple[Any, Any, Any, Any]:
    """The grid; per trajectory (row) the probability to be alive and the expected KV at each of its points; the
    first row of each replica."""
    grid = np.concatenate([[0.0], np.geomspace(8.0, cap, GRID - 1)])
    ahead = grid.astype(np.float32)
    generated, kv, factor = (
        np.concatenate([getattr(load, name) for load in loads]).astype(np.float32)[:, None]
        for name in ("generated", "kv", "factor")
    )
    table, last = survival.share.astype(np.float32), len(survival.share) - 1
    cells = (generated + ahead) / (factor * np.float32(survival.width))
    share = table[np.minimum(cells, last).astype(np.int32)]
    share /= np.maximum(share[:, :1], 1e-9)
    share[:, 0] = 1.0
    share *= generated + ahead <= cap
    starts = np.cumsum([0, *(load.count for load in loads[:-1])])
    return grid, share, share * (kv + ahead), starts


def log_none(share: Numbers) -> Numbers:
    return np.log(np.maximum(1.0 - share, np.float32(1e-7)))


def drain_seconds(remaining: Numbers, curve: StepCurve) -> float:
    """Seconds until the last of a batch is done, with ``remaining`` tokens each and nothing new.

    >>> drain_seconds(np.array([10.0, 30.0]), StepCurve(((1, 1.0), (2, 1.5))))
    35.0
    """
    if not len(remaining):
        return 0.0
    ends = np.sort(remaining)
    batch = np.arange(len(ends), 0, -1, dtype=np.float64)
    return float((np.diff(ends, prepend=0.0) * curve.seconds(batch)).sum())


def hindsight(
    moved: Numbers, stayed: Numbers, curve: StepCurve, *, stall: float, overhead: float
) -> tuple[float, float]:
    """What a move saved and what it cost, in replica seconds, now that all lengths are known.

    Parameters
    ----------
    moved, stayed
        Tokens that the moved trajectories, and those of the destination, had still to come at the move.
    stall, overhead
        Seconds of re-prefill on the destination, and of hand-over and loading as measured.
    """
    saved = drain_seconds(moved, curve)
    both = drain_seconds(np.concatenate([moved, stayed]), curve)
    return saved, both - drain_seconds(stayed, curve) + stall + overhead
