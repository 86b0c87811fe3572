"""How much of their time the replicas generate, from the looks taken at them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

__all__ = ["Span", "busy_fraction", "busy_spans", "busy_windows"]

Looks: TypeAlias = pa.Table | Sequence[Mapping[str, Any]] | None

_RESOLUTION = 1e-6
"""Seconds; looks nearer to each other than that are one."""
_COLUMNS = ("name", "time", "running", "busy", "up")


@dataclass(frozen=True)
class Span:
    """The time between two looks at a replica, unix seconds, and the share of it spent generating."""

    start: float
    end: float
    share: float


def busy_fraction(looks: Looks) -> float | None:
    """Share of all replicas' time in which they generated; None where nothing is known.

    Example
    -------
    >>> looks = [("a", 0.0, 4), ("a", 3.0, 0), ("a", 4.0, 0), ("b", 0.0, 1), ("b", 4.0, 1)]
    >>> busy_fraction([{"name": n, "time": t, "running": r} for n, t, r in looks])
    0.875
    """
    spans = [span for of_one in busy_spans(looks).values() for span in of_one]
    total = sum(span.end - span.start for span in spans)
    return sum((span.end - span.start) * span.share for span in spans) / total if total > 0 else None


def busy_spans(looks: Looks) -> dict[str, list[Span]]:
    """Per replica, in order of time.

    Where looks carry the replica's own clocks (``busy`` seconds of generating out of ``up`` seconds), the share
    is exact; otherwise ``running`` at one look is taken to hold until the next. A replica that restarted
    between two looks (``up`` fell) counts with what its new clocks say.

    Example
    -------
    >>> clocks = [(0.0, 0.0, 0.0), (10.0, 10.0, 4.0), (20.0, 2.0, 2.0)]
    >>> busy_spans([{"name": "a", "time": t, "up": up, "busy": busy} for t, up, busy in clocks])["a"]
    [Span(start=0.0, end=10.0, share=0.4), Span(start=10.0, end=20.0, share=0.2)]
    """
    spans: dict[str, list[Span]] = {}
    for name, rows in _by_replica(looks).items():
        shares = ((now["time"], later["time"], _share(now, later)) for now, later in itertools.pairwise(rows))
        spans[name] = [Span(a, b, share) for a, b, share in shares if b - a > _RESOLUTION and share is not None]
    return spans


def busy_windows(spans: Mapping[str, Sequence[Span]], count: int) -> tuple[dict[str, list[float | None]], float]:
    """Shares in ``count`` equal windows of the whole time, per replica, and the seconds of the whole time.

    A window of which nothing is known is None.

    Example
    -------
    >>> busy_windows({"a": [Span(0.0, 3.0, 1.0), Span(3.0, 4.0, 0.0)], "b": [Span(0.0, 2.0, 0.5)]}, 2)
    ({'a': [1.0, 0.5], 'b': [0.5, None]}, 4.0)
    """
    known = [span for of_one in spans.values() for span in of_one]
    if not known:
        return {}, 0.0
    start, end = min(span.start for span in known), max(span.end for span in known)
    width = (end - start) / count
    windows = {}
    for name, of_one in spans.items():
        busy, total = [0.0] * count, [0.0] * count
        for span in of_one:
            first = min(count - 1, int((span.start - start) / width))
            last = min(count - 1, int((span.end - start) / width))
            for window in range(first, last + 1):
                left = start + window * width
                overlap = max(0.0, min(span.end, left + width) - max(span.start, left))
                busy[window] += overlap * span.share
                total[window] += overlap
        windows[name] = [b / t if t > width * 1e-9 else None for b, t in zip(busy, total, strict=True)]
    return windows, end - start


def _share(now: Mapping[str, Any], later: Mapping[str, Any]) -> float | None:
    clocks = (now.get("busy"), now.get("up"), later.get("busy"), later.get("up"))
    if None not in clocks:
        gained = later["busy"] - (now["busy"] if later["up"] >= now["up"] else 0.0)
        return float(min(1.0, max(0.0, gained / max(1e-9, later["time"] - now["time"]))))
    return None if now.get("running") is None else float(now["running"] > 0)


def _by_replica(looks: Looks) -> dict[str, list[dict[str, Any]]]:
    if isinstance(looks, pa.Table):
        looks = looks.select([name for name in _COLUMNS if name in looks.column_names]).to_pylist()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in looks or ():
        if row.get("name") is not None and row.get("time") is not None:
            groups.setdefault(str(row["name"]), []).append(dict(row))
    return {name: sorted(groups[name], key=lambda row: float(row["time"])) for name in sorted(groups)}
