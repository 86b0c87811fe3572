"""Charts as inline SVG that follow the page's colours and width. Pure: numbers in, markup out."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Series", "line_chart", "strips", "thin", "ticks"]

Point = tuple[float, float]

_WIDTH, _HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 30
_MOST_POINTS = 400
_MOST_HOVERS = 120


@dataclass(frozen=True)
class Series:
    """One line of a chart, or with ``dots`` single points. Points are (x, y), x growing."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels; ``start`` is the pixel of ``low``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(title: str, series: Sequence[Series], *, x_label: str = "step", zero: bool = False) -> str:
    """A ``<figure>`` with the lines, their legend and their values under the pointer; "" without any point.

    Parameters
    ----------
    zero
        Whether the y axis has to begin at zero.
    """
    drawn = [Series(one.name, thin(one.points), one.dots) for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    x_axis = _axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_axis = _padded(min([*ys, 0.0]) if zero else min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    body = [
        *(_y_tick(value, y_axis) for value in ticks(y_axis.low, y_axis.high)),
        *(_x_tick(value, x_axis) for value in ticks(x_axis.low, x_axis.high, whole=True)),
        _text(_WIDTH - _RIGHT, _HEIGHT - 4, x_label, "end"),
        *(_draw(one, index, x_axis, y_axis) for index, one in enumerate(drawn, 1)),
        *_hovers(drawn, x_label, x_axis),
    ]
    names = [one.name for one in drawn] if len(drawn) > 1 or drawn[0].name != title else []
    return _figure(title, names, body, _HEIGHT)


def strips(title: str, rows: Mapping[str, Sequence[float | None]], *, x_label: str, x_end: float) -> str:
    """A ``<figure>`` with one strip a row: the fuller a cell's colour, the nearer its share (0..1) to one.

    None leaves a cell blank. The x axis goes from zero to ``x_end``. "" without any row.
    """
    if not rows:
        return ""
    left, height = 96, 18
    bottom = _TOP + height * len(rows)
    axis = _Axis(0.0, x_end, left, _WIDTH - _RIGHT)
    body = [_text(_WIDTH - _RIGHT, bottom + 26, x_label, "end")]
    body += [_text(axis(value), bottom + 12, _number(value), "middle") for value in ticks(0.0, x_end)]
    for index, (name, cells) in enumerate(rows.items()):
        y = _TOP + index * height
        width = (_WIDTH - _RIGHT - left) / max(1, len(cells))
        body.append(_text(left - 8, y + 12, name[-14:], "end"))
        body += [
            f'<rect class="cell" x="{left + cell * width:.1f}" y="{y}" width="{width:.1f}" height="14"'
            f' opacity="{0.08 + 0.92 * share:.2f}"><title>{_esc(name)}: {share:.0%}</title></rect>'
            for cell, share in enumerate(cells)
            if share is not None
        ]
    return _figure(title, [], body, bottom + 32)


def ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """Round values inside [low, high], about ``count`` of them; with ``whole`` no fractions.

    Example
    -------
    >>> ticks(0.0, 1.0), ticks(1.0, 40.0, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.8)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thin(points: Sequence[Point], limit: int = _MOST_POINTS) -> list[Point]:
    """At most ``limit`` points that keep every peak: of each bucket its lowest and its highest.

    Example
    -------
    >>> thin([(0, 1), (1, 5), (2, 2), (3, 3), (4, 0), (5, 3)], limit=4)
    [(0, 1), (1, 5), (3, 3), (4, 0)]
    """
    if len(points) <= limit:
        return list(points)
    buckets = max(1, limit // 2)
    edges = [round(index * len(points) / buckets) for index in range(buckets + 1)]
    kept: list[Point] = []
    for start, end in itertools.pairwise(edges):
        bucket = points[start:end]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def _axis(low: float, high: float, start: float, end: float) -> _Axis:
    if high > low:
        return _Axis(low, high, start, end)
    margin = abs(low) * 0.1 or 1.0
    return _Axis(low - margin, high + margin, start, end)


def _padded(low: float, high: float, start: float, end: float) -> _Axis:
    axis = _axis(low, high, start, end)
    margin = (axis.high - axis.low) * 0.06
    return _Axis(axis.low - (0.0 if low == 0.0 else margin), axis.high + margin, start, end)


def _y_tick(value: float, axis: _Axis) -> str:
    y = axis(value)
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 6, y + 4, _number(value), "end")


def _x_tick(value: float, axis: _Axis) -> str:
    return _text(axis(value), _HEIGHT - _BOTTOM + 14, _number(value), "middle")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_esc(text)}</text>'


def _draw(series: Series, index: int, x_axis: _Axis, y_axis: _Axis) -> str:
    places = [f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in series.points]
    if series.dots or len(places) == 1:
        circles = (place.split(",") for place in places)
        return "".join(f'<circle class="dot c{index}" cx="{x}" cy="{y}" r="4"/>' for x, y in circles)
    return f'<polyline class="line c{index}" points="{" ".join(places)}"/>'


def _hovers(series: Sequence[Series], x_label: str, axis: _Axis) -> list[str]:
    """Invisible bars, one an x, whose title shows the values there."""
    values: dict[float, list[str]] = {}
    for one in series:
        for x, y in one.points:
            values.setdefault(x, []).append(f"{one.name} {_number(y)}")
    xs = sorted(values)
    xs = xs[:: math.ceil(len(xs) / _MOST_HOVERS)]
    width = (_WIDTH - _LEFT - _RIGHT) / len(xs)
    return [
        f'<rect class="hover" x="{axis(x) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}"'
        f' height="{_HEIGHT - _TOP - _BOTTOM}"><title>{_esc(f"{x_label} {_number(x)}")}: '
        f"{_esc(', '.join(values[x]))}</title></rect>"
        for x in xs
    ]


def _figure(title: str, names: Sequence[str], body: Sequence[str], height: float) -> str:
    keys = (f'<span class="key c{index}">{_esc(name)}</span>' for index, name in enumerate(names, 1))
    label = _esc(title)
    return (
        f"<figure><figcaption><b>{label}</b><span>{''.join(keys)}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(body)}</svg></figure>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
