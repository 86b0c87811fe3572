"""Python's garbage collector, told not to stop an event loop.

A full collection looks at every object that lives: half a second to a second in a scheduler that knows ten thousand
tasks, and it finds next to nothing, for Dask and we leave few cycles behind.
"""

from __future__ import annotations

import gc

__all__ = ["calm_collector"]

YOUNG, MIDDLE, OLD = 1_000, 10, 5_000
"""Objects made before the youngest are looked at; collections of one generation before one of the next."""


def calm_collector() -> None:
    """Full collections become rare in this process: many minutes apart where tasks come by the hundred a second."""
    gc.set_threshold(YOUNG, MIDDLE, OLD)
