"""Benchmarks: each measures a ratio in one run (ours / the library alone) and returns one JSON object.

``laminar-flow bench NAME --json``. Times depend on the machine; the ratios are what is promised.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["BENCHES", "say"]

_BEGAN = time.monotonic()


def say(what: str) -> None:
    """How a measurement goes on, on stderr: what is being measured, and seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:4.0f} s] {what}", file=sys.stderr, flush=True)


def _rollout() -> dict[str, Any]:
    """Tokens/s through Laminar's tasks on one replica / the engine library alone."""
    from laminar.bench.rollout import bench_rollout

    return bench_rollout()


def _relay(*, only: Sequence[str] = ()) -> dict[str, Any]:
    """Handing a version over, taking it, and carrying it down a chain of relays, also when some are killed."""
    from laminar.bench.relay import bench_relay

    return bench_relay(only=only)


def _repack(*, paper: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """Tokens/s with and without moving the long tail, on emulated 32B replicas; --paper is the whole of it."""
    from laminar.bench.repack import bench_repack

    return bench_repack(paper=paper, only=only)


def _table(*, only: Sequence[str] = ()) -> dict[str, Any]:
    """Appends, samples, memory and queries of the experience table / pyarrow, a memory copy and DuckDB alone."""
    from laminar.bench.table import bench_table

    return bench_table(only=only)


BENCHES: dict[str, Callable[..., dict[str, Any]]] = {
    "relay": _relay,
    "repack": _repack,
    "rollout": _rollout,
    "table": _table,
}
"""Name -> function; ``laminar-flow bench`` lists them with their docstrings' first paragraphs."""
