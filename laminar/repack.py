"""Repack: which replicas are in their long tail, and which of them to empty onto which others. Pure rules.

After Algorithm 1 of arXiv 2510.12633, without its faults: idleness is latched, a destination is never released by
the same plan, loads planned onto it count at once on KV and on batch, it must have room for what its trajectories
will grow to, and a move has to pay: replica seconds saved against the re-prefill, the larger batch and the
hand-over. Versions are never mixed, and only idle replicas receive.

A replica enters as an ``Outlook``: curves over the tokens still to come, which add up. That makes a plan over many
replicas cheap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from laminar.outlook import Outlook, curves, drain_seconds, hindsight, log_none
from laminar.rollout.latency import StepCurve
from laminar.rollout.lengths import Survival

__all__ = ["Idleness", "Load", "Move", "Plan", "Release", "Rules", "drain_seconds", "hindsight", "plan", "spread"]

Numbers = npt.NDArray[np.float64]

NEVER = -1e18
SPLIT = 4
"""Most destinations of one source."""


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


def plan(loads: Sequence[Load], rules: Rules, survival: Survival, *, now: float) -> Plan:
    """Release as many idle replicas as pay, smallest first, each onto the best fits of its version group."""
    releases: list[Release] = []
    refused: Counter[str] = Counter()
    groups: dict[int, list[Load]] = {}
    for load in loads:
        if load.idle and not load.waiting and load.count:
            groups.setdefault(load.version, []).append(load)
    for group in groups.values():
        if len(group) > 1:
            releases += _Packing(sorted(group, key=lambda load: load.kv_used), rules, survival, now).run(refused)
    return Plan(tuple(releases), sum(map(len, groups.values())), dict(refused))


class _Packing:
    """The plan of one version group, made step by step. Rows are replicas, in order of their load."""

    def __init__(self, loads: list[Load], rules: Rules, survival: Survival, now: float) -> None:
        self.loads, self.rules, self.now = loads, rules, now
        self.grid, self.share, held, starts = curves(loads, rules.cap, survival)
        self.bounds = np.append(starts, len(self.share))
        self.held = held
        self.outlook = Outlook(
            np.add.reduceat(self.share, starts, axis=0),
            np.add.reduceat(log_none(self.share), starts, axis=0),
            np.add.reduceat(held, starts, axis=0),
        )
        self.count = np.array([load.count for load in loads])
        self.used = np.array([load.kv_used for load in loads])
        self.limit = rules.kv_limit * np.array([float(load.kv_total) for load in loads])
        self.alone = self.outlook.seconds(rules.curve, self.grid)
        self.released = np.zeros(len(loads), dtype=bool)
        self.received = np.zeros(len(loads), dtype=bool)

    def run(self, refused: Counter[str]) -> list[Release]:
        """All releases that pay; counts why the others do not happen."""
        found = []
        for source, load in enumerate(self.loads):
            if self.received[source]:
                continue  # no chained release
            if float((self.now - load.moved_at).min()) < self.rules.pause:
                refused["pause"] += 1
                continue
            parts = self._whole(source) or self._split(source)
            if parts is None:
                refused["no_room"] += 1
                continue
            release = self._release(source, parts)
            if release is None:
                refused["does_not_pay"] += 1
                continue
            found.append(release)
        return found

    def _whole(self, source: int) -> list[_Part] | None:
        """Everything onto the fullest destination that has room now and later."""
        rules, n = self.rules, self.count[source]
        room = ~self.released & (self.count + n <= rules.batch_bound) & (self.used + self.used[source] <= self.limit)
        room[source] = False
        for target in np.argsort(-self.used, kind="stable"):
            if room[target] and (self.outlook.kv[target] + self.outlook.kv[source]).max() <= self.limit[target]:
                return [
                    _Part(int(target), slice(self.bounds[source], self.bounds[source + 1]), self.outlook.row(source))
                ]
        return None

    def _split(self, source: int) -> list[_Part] | None:
        """Spread over several destinations, the fullest first, each filled as far as it has room."""
        others = np.nonzero(~self.released & (np.arange(len(self.loads)) != source))[0]
        free = np.minimum(self.limit - self.used, self.limit - self.outlook.kv.max(axis=1))[others]
        if free[free > 0].sum() < self.used[source]:
            return None
        parts: list[_Part] = []
        start, end = int(self.bounds[source]), int(self.bounds[source + 1])
        for target in others[np.argsort(-self.used[others], kind="stable")][-SPLIT:]:
            most = min(end - start, int(self.rules.batch_bound - self.count[target]))
            if most <= 0:
                continue
            grown = np.cumsum(self.held[start : start + most], axis=0) + self.outlook.kv[target]
            fits = int((grown.max(axis=1) <= self.limit[target]).sum())
            if fits:
                piece = slice(start, start + fits)
                parts.append(_Part(int(target), piece, self._of(piece)))
                start += fits
            if start == end:
                return parts
        return None

    def _of(self, piece: slice) -> Outlook:
        share = self.share[piece]
        return Outlook(share.sum(axis=0), log_none(share).sum(axis=0), self.held[piece].sum(axis=0))

    def _release(self, source: int, parts: list[_Part]) -> Release | None:
        rules = self.rules
        saved = float(self.alone[source])
        merged = [self.outlook.row(part.target).plus(part.outlook) for part in parts]
        seconds = [float(outlook.seconds(rules.curve, self.grid)) for outlook in merged]
        slower = sum(after - float(self.alone[part.target]) for part, after in zip(parts, seconds, strict=True))
        cost = slower + float(self.used[source]) / rules.prefill_rate + rules.overhead
        if saved < (1.0 + rules.margin) * cost:
            return None
        load, first = self.loads[source], int(self.bounds[source])
        moves = []
        for part, outlook, after in zip(parts, merged, seconds, strict=True):
            own = slice(part.piece.start - first, part.piece.stop - first)
            moves.append(Move(load.name, self.loads[part.target].name, load.keys[own]))
            self.outlook.put(part.target, outlook)
            self.alone[part.target] = after
            self.count[part.target] += part.piece.stop - part.piece.start
            self.used[part.target] += float(load.kv[own].sum())
            self.received[part.target] = True
        self.released[source] = True
        return Release(load.name, tuple(moves), saved, cost)


@dataclass(frozen=True)
class _Part:
    """A run of the source's trajectories, by their rows, for one destination."""

    target: int
    piece: slice
    outlook: Outlook


def spread(source: Load, others: Sequence[Load], rules: Rules) -> dict[str, tuple[str, ...]]:
    """Where the trajectories of a replica go that has to be emptied, pay or not: ``target -> keys``.

    Each goes to the least loaded replica of its version with room for it now, else of any version (which will
    have to load the older one first); B is kept where it can be.

    Example
    -------
    >>> def load(name, count):
    ...     zero = np.zeros(count)
    ...     return Load(name, 1, 1000, True, 0, tuple(f"{name}{i}" for i in range(count)), zero + 9, zero, zero, zero)
    >>> rules = Rules(StepCurve(((1, 1.0), (9, 2.0))), cap=10)
    >>> {target: len(keys) for target, keys in spread(load("a", 4), [load("b", 2), load("c", 0)], rules).items()}
    {'c': 3, 'b': 1}
    """
    same = [load for load in others if load.version == source.version]
    counts = {load.name: load.count for load in same or others}
    room = {load.name: rules.kv_limit * load.kv_total - load.kv_used for load in same or others}
    chosen: dict[str, list[str]] = {}
    for key, kv in sorted(zip(source.keys, source.kv, strict=True), key=lambda pair: -pair[1]):
        if not counts:
            break
        fits = [name for name in counts if counts[name] < rules.batch_bound and room[name] >= kv]
        target = min(fits or counts, key=lambda name: counts[name])
        counts[target] += 1
        room[target] -= float(kv)
        chosen.setdefault(target, []).append(key)
    return {target: tuple(keys) for target, keys in chosen.items()}
