"""Benchmarks: each measures a ratio in one run (ours / the library alone) and returns one JSON object.

``laminar-flow bench NAME --json``. Times depend on the machine; the ratios are what is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["BENCHES"]


def _rollout() -> dict[str, Any]:
    """Tokens/s through Laminar's tasks on one replica / the engine library alone."""
    from laminar.bench.rollout import bench_rollout

    return bench_rollout()


BENCHES: dict[str, Callable[[], dict[str, Any]]] = {"rollout": _rollout}
"""Name -> function; its docstring's first line is what ``bench --help`` shows."""
