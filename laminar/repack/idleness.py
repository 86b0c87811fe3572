"""When a replica is past its steady phase, so that its trajectories may be moved away. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Idleness"]


@dataclass(frozen=True, slots=True)
class Idleness:
    """Whether a replica is in its ramp-down: a latch, looked at again and again.

    Ramp-down begins when nothing waits and KV use is below the limit and below its peak since the last refill; it
    lasts until the replica is refilled. (A test for a fall from one look to the next goes blind in the tail, where
    the last trajectories' KV grows; one without the peak would take the ramp-up for it.)

    Parameters
    ----------
    idle
        The latch.
    peak
        Most KV in use since the last refill, in tokens.
    filled
        Trajectories ever given to the replica, without those handed over: a change is a refill.

    Example
    -------
    >>> look, seen = Idleness(), []
    >>> for kv, waiting in [(50, 0), (99, 0), (100, 7), (100, 0), (80, 0), (20, 0), (25, 0)]:
    ...     look = look.after(kv_used=kv, kv_total=100, waiting=waiting, filled=1)
    ...     seen.append(look.idle)
    >>> seen
    [False, False, False, False, True, True, True]
    """

    idle: bool = False
    peak: int = 0
    filled: int = -1

    def after(self, *, kv_used: int, kv_total: int, waiting: int, filled: int, kv_limit: float = 0.99) -> Idleness:
        """What is known after one more look."""
        if filled != self.filled:
            return Idleness(False, kv_used, filled)
        peak = max(self.peak, kv_used)
        if waiting:
            return Idleness(False, peak, filled)
        return Idleness(self.idle or kv_used < min(kv_limit * kv_total, peak), peak, filled)
