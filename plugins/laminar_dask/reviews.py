"""What releases really won: counted again once the lengths of all trajectories that took part are known. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from laminar.repack import Load, Release, Rules, drain_seconds, hindsight

__all__ = ["Reviews"]

ENDS = 50_000
"""Lengths of finished trajectories that are remembered."""
OPEN = 500
"""Releases that wait for their lengths; older ones are dropped."""


@dataclass
class _Open:
    plan: int
    release: Release
    rules: Rules
    had: dict[str, float]
    """Tokens of the response at the move, of all trajectories that took part."""
    stayed: dict[str, tuple[str, ...]]
    """Those that the targets had already."""
    prefilled: dict[str, float]
    """Tokens prefilled again on each target."""


class Reviews:
    """Keeps releases until all of their trajectories are done."""

    def __init__(self) -> None:
        self.ends: OrderedDict[str, int] = OrderedDict()
        self.open: deque[_Open] = deque(maxlen=OPEN)
        self.done = self.not_paying = 0
        self.measured = self.expected = 0.0

    def add(self, plan: int, release: Release, loads: Mapping[str, Load], rules: Rules) -> None:
        """A release of plan number ``plan`` is being executed; ``loads`` as they were when it was planned."""
        source = loads[release.source]
        stayed = {move.target: loads[move.target].keys for move in release.moves}
        had = dict(zip(source.keys, source.generated.tolist(), strict=True))
        for target in stayed:
            had.update(zip(loads[target].keys, loads[target].generated.tolist(), strict=True))
        kv = dict(zip(source.keys, source.kv.tolist(), strict=True))
        prefilled = {move.target: sum(kv[key] for key in move.keys) for move in release.moves}
        self.open.append(_Open(plan, release, rules, had, stayed, prefilled))

    def finished(self, lengths: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
        """Trajectories are done; what that says of releases, as events."""
        for key, tokens in lengths:
            self.ends[key] = tokens
        while len(self.ends) > ENDS:
            self.ends.popitem(last=False)
        ready = [entry for entry in self.open if all(key in self.ends for key in entry.had)]
        for entry in ready:
            self.open.remove(entry)
        return [self._review(entry) for entry in ready]

    def _review(self, entry: _Open) -> dict[str, Any]:
        release, curve = entry.release, entry.rules.curve

        def left(keys: Iterable[str]) -> Any:
            return np.array([max(0.0, self.ends[key] - entry.had[key]) for key in keys])

        saved = drain_seconds(left(key for move in release.moves for key in move.keys), curve)
        cost = entry.rules.overhead
        for move in release.moves:
            stall = entry.prefilled[move.target] / entry.rules.prefill_rate
            stayed = left(entry.stayed[move.target])
            cost += hindsight(left(move.keys), stayed, curve, stall=stall, overhead=0.0)[1]
        self.done += 1
        self.not_paying += saved < cost
        self.measured += saved - cost
        self.expected += release.gain
        return {
            "action": "review",
            "plan": entry.plan,
            "source": release.source,
            "gain_expected": release.gain,
            "gain_measured": saved - cost,
            "cost_expected": release.cost,
            "cost_measured": cost,
        }
