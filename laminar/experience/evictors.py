"""Which ready groups are never to be trained on, and why: pure functions over what the index calls ready.

An evictor maps the ids of the groups it gives up to a reason, which the table keeps and counts. One of the
user's own is such a function too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from laminar.experience.facts import Group

__all__ = ["Evictor", "capacity", "equal_rewards", "older_than", "staleness_ceiling"]


class Evictor(Protocol):
    """Gives groups up."""

    def __call__(self, ready: Sequence[Group], *, version: int, now: float) -> Mapping[str, str]:
        """Group id -> reason, of those to evict. ``version`` is the one to be updated, ``now`` unix seconds."""


def staleness_ceiling(n: int) -> Evictor:
    """Evicts groups with a row more than ``n`` versions behind, as ``stale``.

    Versions only grow, so a group that is too stale now stays so: it goes whole, wherever it stands in the queue.
    The ceiling is hard because it is checked when rows are handed out to be trained on: a check when prompts are
    admitted bounds the mean, and a long tail breaks it.

    >>> from laminar.experience.facts import Row
    >>> old = Group("g0", 2, (Row("g0-0", "g0", 0, 2, weight_version=2), Row("g0-1", "g0", 1, 2, weight_version=5)))
    >>> staleness_ceiling(2)([old], version=5, now=0.0), staleness_ceiling(3)([old], version=5, now=0.0)
    ({'g0': 'stale'}, {})
    """
    return partial(_stale, ceiling=n)


def older_than(seconds: float) -> Evictor:
    """Evicts groups whose last row was scored more than ``seconds`` ago, as ``age``.

    >>> from laminar.experience.facts import Row
    >>> group = Group("g0", 1, (Row("g0-0", "g0", 0, 1, weight_version=0, finished_at=100.0),))
    >>> older_than(60)([group], version=0, now=161.0), older_than(60)([group], version=0, now=160.0)
    ({'g0': 'age'}, {})
    """
    return partial(_aged, seconds=seconds)


def capacity(rows: int) -> Evictor:
    """Evicts the groups complete for longest while more than ``rows`` rows are ready, as ``capacity``.

    >>> from laminar.experience.facts import Row
    >>> ready = [Group(name, 1, (Row(name + "-0", name, 0, 1, weight_version=0),)) for name in ("g0", "g1", "g2")]
    >>> capacity(2)(ready, version=0, now=0.0)
    {'g0': 'capacity'}
    """
    return partial(_beyond, rows=rows)


def equal_rewards(ready: Sequence[Group], *, version: int, now: float) -> dict[str, str]:
    """Evicts groups whose rewards are all equal, as ``equal_rewards``: their advantages are all zero.

    This is dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step takes groups that have something to
    learn from, and others are generated in the place of those that have not.

    >>> from laminar.experience.facts import Row
    >>> def group(name, *rewards):
    ...     rows = (Row(f"{name}-{n}", name, n, 2, 0, reward=reward) for n, reward in enumerate(rewards))
    ...     return Group(name, 2, tuple(rows))
    >>> equal_rewards([group("g0", 1.0, 1.0), group("g1", 0.0, 1.0)], version=0, now=0.0)
    {'g0': 'equal_rewards'}
    """
    return {group.id: "equal_rewards" for group in ready if len(set(group.rewards)) == 1}


def _stale(ready: Sequence[Group], *, version: int, now: float, ceiling: int) -> dict[str, str]:
    return {group.id: "stale" for group in ready if version - group.oldest_version > ceiling}


def _aged(ready: Sequence[Group], *, version: int, now: float, seconds: float) -> dict[str, str]:
    return {group.id: "age" for group in ready if now - group.finished_at > seconds}


def _beyond(ready: Sequence[Group], *, version: int, now: float, rows: int) -> dict[str, str]:
    excess = sum(len(group.scored) for group in ready) - rows
    gone: dict[str, str] = {}
    for group in ready:
        if excess <= 0:
            break
        gone[group.id] = "capacity"
        excess -= len(group.scored)
    return gone
