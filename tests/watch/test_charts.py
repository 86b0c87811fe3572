"""Charts are well-formed, keep their peaks and survive any numbers."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from laminar.watch.charts import Series, line_chart, strips, thin, ticks

numbers = st.floats(-1e9, 1e9, allow_subnormal=False)


@given(st.lists(numbers, min_size=1, max_size=30), st.booleans(), st.booleans())
def test_a_chart_of_any_numbers_is_well_formed_and_stays_inside(ys: list[float], zero: bool, dots: bool) -> None:
    chart = line_chart("<Reward & more>", [Series("a<b", list(enumerate(ys)), dots=dots)], zero=zero)
    root = ElementTree.fromstring(chart)
    for line in root.iter("polyline"):
        for place in line.get("points", "").split():
            x, y = (float(part) for part in place.split(","))
            assert 0 <= x <= 420 and 0 <= y <= 220


def test_a_chart_without_a_point_is_nothing() -> None:
    assert line_chart("Reward", [Series("a", [])]) == ""
    assert strips("Busy", {}, x_label="minutes", x_end=1.0) == ""


@given(st.lists(numbers, min_size=1, max_size=300), st.integers(2, 50))
def test_thinning_keeps_the_limit_the_order_and_every_peak(ys: list[float], limit: int) -> None:
    kept = thin(list(enumerate(ys)), limit)
    assert len(kept) <= max(limit, 2)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert {min(ys), max(ys)} <= {y for _, y in kept}


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low: float, size: float) -> None:
    values = ticks(low, low + size)
    assert 1 <= len(values) <= 7
    assert all(low - size * 1e-6 <= value <= low + size * 1.000001 for value in values)


def test_strips_leave_unknown_cells_blank() -> None:
    root = ElementTree.fromstring(strips("Busy", {"a": [0.5, None, 1.0]}, x_label="minutes", x_end=2.0))
    assert [title.text for title in root.iter("title")] == ["a: 50%", "a: 100%"]
