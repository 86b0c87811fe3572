"""Throughput over staleness, with and without repack: how far one line lies above the other, and a picture of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["draw", "least_gain"]


def least_gain(front: Sequence[dict[str, Any]]) -> float:
    """By how much the line with repack lies above the one without where it is least so, at equal staleness.

    Beyond the ends of a line its last point counts.

    >>> points = [(0.3, 50, "without"), (0.9, 90, "without"), (0.4, 80, "with"), (0.8, 100, "with")]
    >>> front = [{"staleness": x, "tokens_per_second": y, "mode": mode} for x, y, mode in points]
    >>> round(least_gain(front), 3)  # at a staleness of 0.9
    0.111
    """
    lines = {mode: _line(front, mode) for mode in ("without", "with")}
    at = np.unique(np.concatenate([x for x, _ in lines.values()]))
    without, with_repack = (np.interp(at, *lines[mode]) for mode in ("without", "with"))
    return float((with_repack / without).min() - 1)


def _line(front: Sequence[dict[str, Any]], mode: str) -> tuple[list[float], list[float]]:
    points = sorted((p["staleness"], p["tokens_per_second"]) for p in front if p["mode"] == mode)
    return [x for x, _ in points], [y for _, y in points]


def draw(front: Sequence[dict[str, Any]], path: str) -> None:
    """Write the picture to ``path``, a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for mode in ("without", "with"):
        x, y = _line(front, mode)
        axes.plot(x, [value / 1000 for value in y], marker="o", label=f"{mode} repack")
    for point in front:
        place = point["staleness"], point["tokens_per_second"] / 1000
        axes.annotate(str(point["batch"]), place, xytext=(6, -12), textcoords="offset points")
    axes.margins(0.1)
    axes.set(xlabel="mean staleness (versions)", ylabel="thousand tokens/s", title="batch size marked at each point")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
