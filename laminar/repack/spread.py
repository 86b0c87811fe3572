"""Where the trajectories of a replica go that has to be emptied by hand. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from laminar.repack.loads import Load
from laminar.repack.plans import Rules

__all__ = ["spread"]


def spread(source: Load, others: Sequence[Load], rules: Rules) -> dict[str, tuple[str, ...]]:
    """Where the trajectories of a replica go that has to be emptied, pay or not: ``target -> keys``.

    Each goes to the least loaded replica of its version with room for it now, else of any version (which will
    have to load the older one first); B is kept where it can be.

    Example
    -------
    >>> import numpy as np
    >>> from laminar.rollout.latency import StepCurve
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
