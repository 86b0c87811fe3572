"""The state of a run as its watcher knows it, fed by events. Pure: no terminal, no clock, no client."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunView", "one_line", "shown", "sparkline", "whole"]

_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class RunView:
    """What is known of a run. ``observe`` takes events (see ``laminar.watch.events``) in any order.

    Example
    -------
    >>> view = RunView()
    >>> view.observe({"type": "step", "step": 1, "steps": 40, "reward_mean": 0.2})
    True
    >>> view.observe({"type": "weather"})
    False
    >>> view.step, view.steps, view.rewards
    (1, 40, {1: 0.2})
    """

    step: int = 0
    steps: int = 0
    before: int = 0
    """Steps that were done when the watcher came: a run that was resumed does not begin at the first."""
    rewards: dict[int, float] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    """The newest step event."""
    table: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    replicas: dict[str, dict[str, Any]] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)

    def observe(self, event: Mapping[str, Any]) -> bool:
        """Take an event in; False for one that changes nothing here."""
        match event.get("type"):
            case "step":
                self._observe_step(event)
            case "replica":
                self.replicas[str(event.get("name", "?"))] = dict(event)
            case "table":
                self.table = dict(event)
            case "evaluation":
                self.evaluation = dict(event)
            case "stage":
                self.stages[str(event.get("name", "?"))] = str(event.get("state", "?"))
            case _:
                return False
        return True

    def _observe_step(self, event: Mapping[str, Any]) -> None:
        step = int(event.get("step", self.step))
        if not self.last or step <= self.before:
            self.before = step - 1
        self.step = step
        self.steps = int(event.get("steps", self.steps))
        self.last = dict(event)
        for later in [step for step in self.rewards if step >= self.step]:  # the trainer went back
            del self.rewards[later]
        reward = event.get("reward_mean")
        if isinstance(reward, (int, float)) and math.isfinite(reward):
            self.rewards[self.step] = float(reward)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Values as a row of bars, scaled from lowest to highest; many are averaged down to ``width``.

    Example
    -------
    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([0.5, 0.5]), sparkline([])
    ('▁▁', '')
    """
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    means = [math.fsum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def shown(value: Any, digits: int = 3, unit: str = "") -> str:
    """A number for people; a dash for what is not known.

    Example
    -------
    >>> shown(0.41234), shown(2210.4, 0), shown(4.2, 0, " %"), shown(None), shown(float("nan"))
    ('0.412', '2,210', '4 %', '-', '-')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    return f"{value:,.{digits}f}{unit}"


def whole(value: Any) -> str:
    """A count for people."""
    return shown(value, 0)


def one_line(text: str) -> str:
    """Text from elsewhere made fit for a terminal: control characters cannot move the cursor or add lines.

    Example
    -------
    >>> one_line("reward\\x1b[31m raised:\\n  no answer")
    'reward[31m raised: no answer'
    """
    return " ".join("".join(c for c in text if c.isprintable() or c.isspace()).split())
