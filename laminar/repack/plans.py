"""What a plan goes by, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laminar.rollout.latency import StepCurve

__all__ = ["Move", "Plan", "Release", "Rules"]


@dataclass(frozen=True)
class Rules:
    """What a plan goes by. Seconds are the engine's own.

    Parameters
    ----------
    curve
        Measured seconds of a decode step by batch.
    cap
        Longest response in tokens.
    batch_bound
        B, the most trajectories on a destination; ``curve.batch_bound()`` if not given.
    prefill_rate
        Tokens/s; ``curve.decode_rate``, a lower bound, if not given.
    kv_limit
        Share of a destination's KV that may be used, now and when its trajectories have grown.
    margin
        A move must save so much more than it costs: ``saved >= (1 + margin) * cost``.
    pause
        Seconds before the same trajectory moves again.
    overhead
        Seconds of replica time that a release costs in any case: plan, hand-over, loading weights.
    """

    curve: StepCurve
    cap: int
    batch_bound: int = 0
    prefill_rate: float = 0.0
    kv_limit: float = 0.99
    margin: float = 1.0
    pause: float = 30.0
    overhead: float = 1.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_bound", self.batch_bound or self.curve.batch_bound())
        object.__setattr__(self, "prefill_rate", self.prefill_rate or self.curve.decode_rate)


@dataclass(frozen=True)
class Move:
    """Trajectories that go from ``source`` to ``target``: one hand-over, in bulk."""

    source: str
    target: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """A replica that is emptied. Seconds of replica time: what that is expected to save, and to cost elsewhere."""

    source: str
    moves: tuple[Move, ...]
    saved: float = 0.0
    cost: float = 0.0

    @property
    def gain(self) -> float:
        """Replica seconds won."""
        return self.saved - self.cost


@dataclass(frozen=True)
class Plan:
    """Releases, in no particular order, and why there are none where there are none."""

    releases: tuple[Release, ...] = ()
    idle: int = 0
    """Idle replicas with unfinished trajectories."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Sources that stay, by reason: ``pause``, ``no_room``, ``does_not_pay``."""

    @property
    def released(self) -> tuple[str, ...]:
        """Replicas that it empties."""
        return tuple(release.source for release in self.releases)

    @property
    def moves(self) -> tuple[Move, ...]:
        """All hand-overs."""
        return tuple(move for release in self.releases for move in release.moves)
