"""How much of their time the replicas generate."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.watch.busy import Span, busy_fraction, busy_spans, busy_windows


def test_a_busy_look_counts_until_the_next_look() -> None:
    looks = [{"name": "a", "time": t, "running": r} for t, r in [(0.0, 2), (9.0, 0), (10.0, 0)]]
    assert busy_fraction(looks) == pytest.approx(0.9)
    assert busy_fraction(list(reversed(looks))) == pytest.approx(0.9)
    assert busy_fraction(pa.Table.from_pylist(looks)) == pytest.approx(0.9)
    assert busy_fraction(looks[:1]) is None


def test_a_look_that_knows_nothing_is_left_out() -> None:
    assert busy_fraction(None) is None
    assert busy_fraction([{"name": "a", "time": t, "running": None} for t in (0.0, 1.0)]) is None
    assert busy_fraction([{"time": 0.0, "running": 1}, {"name": "a", "running": 1}]) is None


def test_the_replicas_own_clocks_are_believed_before_the_looks() -> None:
    looks = [
        {"name": "a", "time": 0.0, "running": 0, "busy": 1.0, "up": 5.0},
        {"name": "a", "time": 10.0, "running": 0, "busy": 9.0, "up": 15.0},
    ]
    assert busy_fraction(looks) == pytest.approx(0.8)


def test_a_replica_that_restarted_is_never_negatively_busy() -> None:
    looks = [
        {"name": "a", "time": 0.0, "busy": 90.0, "up": 100.0},
        {"name": "a", "time": 10.0, "busy": 1.0, "up": 2.0},
    ]
    assert busy_spans(looks) == {"a": [Span(0.0, 10.0, 0.1)]}


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3), st.sampled_from("ab")), max_size=30),
    st.integers(1, 8),
)
def test_windows_hold_all_the_time_that_is_known(looks: list[tuple[float, int, str]], count: int) -> None:
    spans = busy_spans([{"name": name, "time": time, "running": running} for time, running, name in looks])
    windows, seconds = busy_windows(spans, count)
    known = [share for shares in windows.values() for share in shares if share is not None]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in known)
    assert seconds <= 100
    assert bool(known) == any(spans.values())
