"""The plan: best fit within each version group, smallest replicas first, as far as it pays. Pure.

A replica enters as an ``Outlook``: curves over the tokens still to come, which add up. That makes a plan over many
replicas cheap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar.repack.loads import Load
from laminar.repack.outlook import Outlook, curves, log_none
from laminar.repack.plans import Move, Plan, Release, Rules
from laminar.rollout.lengths import Survival

__all__ = ["plan"]

SPLIT = 4
"""Most destinations of one source."""


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
