"""A replica as the rules see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["NEVER", "Load"]

Numbers = npt.NDArray[np.float64]

NEVER = -1e18


@dataclass(frozen=True)
class Load:
    """A replica and its unfinished trajectories, as they are now. Arrays have one entry a trajectory.

    Parameters
    ----------
    kv
        Tokens in the cache, prompt included: what a move has to prefill again.
    generated
        Tokens of the response so far.
    moved_at
        When it was last moved, in seconds of the same clock as ``now``; ``NEVER`` if it was not.
    factor
        ``Lengths.factors`` of its group.
    """

    name: str
    version: int
    kv_total: int
    idle: bool
    waiting: int
    keys: tuple[str, ...]
    kv: Numbers
    generated: Numbers
    moved_at: Numbers
    factor: Numbers

    @property
    def count(self) -> int:
        """Unfinished trajectories."""
        return len(self.keys)

    @cached_property
    def kv_used(self) -> float:
        """Tokens of KV cache in use."""
        return float(self.kv.sum())
