"""How long one decode step takes at which batch: measured points, and the batch up to which a step stays cheap."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["LatencyMeter", "StepCurve"]

Numbers = npt.NDArray[np.float64]

MERGED = 0.75
"""Two half batches on one replica may take at most this share of the replica time that they take on two. On a
roofline ``t(b) = a + c * b`` that is a batch of ``2 * a / c``, twice the turning point from memory-bound to
compute-bound: beyond it, putting trajectories together no longer saves much."""
SAMPLES = 15
"""Measurements of a batch size that are remembered; their median counts, so that a prefill in between does not."""


@dataclass(frozen=True)
class StepCurve:
    """Seconds of one decode step by batch: straight lines between the points, and on beyond the last two.

    Parameters
    ----------
    points
        ``(batch, seconds)``, at least one. A point that is faster than a smaller batch is raised to it.

    Example
    -------
    >>> curve = StepCurve(((1, 0.010), (64, 0.016), (256, 0.034)))
    >>> round(float(curve.seconds(160)), 4), curve.batch_bound()
    (0.025, 213)
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a step curve needs at least one point (batch, seconds)")

    @cached_property
    def _line(self) -> tuple[Numbers, Numbers]:
        points = sorted(self.points)
        batch = np.array([b for b, _ in points], dtype=np.float64)
        seconds = np.maximum.accumulate(np.array([s for _, s in points], dtype=np.float64))
        slope = (seconds[-1] - seconds[-2]) / max(1e-9, batch[-1] - batch[-2]) if len(points) > 1 else 0.0
        far = 1e6
        return np.append(batch, batch[-1] + far), np.append(seconds, seconds[-1] + slope * far)

    def seconds(self, batch: float | Numbers) -> Numbers:
        """Seconds of a step at a batch or at several; fractions are allowed, below the first point it is flat."""
        return np.asarray(np.interp(batch, *self._line), dtype=np.float64)

    def batch_bound(self, merged: float = MERGED) -> int:
        """B, the largest batch worth having: two halves of it on one replica take at most ``merged`` of their time
        on two. At most twice the largest batch that was measured."""
        batches = np.arange(1.0, 2 * self._line[0][-2] + 1)
        worth = self.seconds(batches) <= 2 * merged * self.seconds(batches / 2)
        return int(batches[worth].max())

    @property
    def decode_rate(self) -> float:
        """Tokens/s at the largest measured batch: prefill is at least as fast."""
        batch, seconds = self._line
        return float(batch[-2] / seconds[-2])


class LatencyMeter:
    """Collects seconds a step from what a replica does anyway: tokens in a time at a batch.

    Batches are put into buckets a factor of two wide, each with the median of its last measurements.

    Example
    -------
    >>> meter = LatencyMeter()
    >>> for batch in (1, 8, 64):
    ...     meter.add(batch=batch, tokens=100 * batch, seconds=100 * (0.01 + batch / 8000))
    >>> [round(float(s), 3) for s in meter.curve().seconds(np.array([1.0, 64.0]))]
    [0.01, 0.018]
    """

    def __init__(self) -> None:
        self._buckets: dict[int, deque[tuple[float, float]]] = {}

    def add(self, *, batch: float, tokens: int, seconds: float) -> None:
        """``tokens`` came in ``seconds`` while about ``batch`` trajectories were decoding."""
        if batch < 1 or tokens <= 0 or seconds <= 0:
            return
        self._buckets.setdefault(int(np.log2(batch)), deque(maxlen=SAMPLES)).append((batch, seconds * batch / tokens))

    def merge(self, points: Iterable[tuple[float, float]]) -> None:
        """Take up what another meter measured."""
        for batch, seconds in points:
            self.add(batch=batch, tokens=max(1, round(batch)), seconds=seconds * max(1, round(batch)) / batch)

    def points(self) -> list[tuple[float, float]]:
        """``(batch, seconds a step)`` of each bucket, smallest batch first."""
        of_each = (np.median(self._buckets[bucket], axis=0) for bucket in sorted(self._buckets))
        return [(float(batch), float(seconds)) for batch, seconds in of_each]

    def curve(self) -> StepCurve | None:
        """The curve so far; None before anything was measured."""
        points = self.points()
        return StepCurve(tuple(points)) if points else None
