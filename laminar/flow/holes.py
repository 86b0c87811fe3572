"""Values with results in them that are not known yet: taken out for Dask, put back on the worker.

Dask can look into containers itself, but it flattens what it finds there: annotations and keys of the nodes
within are lost. So every ``Delayed`` is given to it as an argument of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Hole", "fill", "take_out"]


@dataclass(frozen=True)
class Hole:
    """The place of the result with this number."""

    number: int


def take_out(value: Any, taken: list[Any]) -> Any:
    """A copy of lists, tuples, sets and dicts (their values) with holes for the ``Delayed`` in them.

    Parameters
    ----------
    taken
        The ``Delayed`` of hole n is appended as its n-th; one that is there already is not taken twice.
    """
    from dask.delayed import Delayed

    if isinstance(value, Delayed):
        keys = [other.key for other in taken]
        if value.key not in keys:
            taken.append(value)
            return Hole(len(keys))
        return Hole(keys.index(value.key))
    if type(value) is dict:
        return {key: take_out(item, taken) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(take_out(item, taken) for item in value)
    return value


def fill(value: Any, results: Sequence[Any]) -> Any:
    """The value with its results in the holes.

    Example
    -------
    >>> fill({"sizes": [Hole(1), 3], "name": (Hole(0),)}, ["a", 2])
    {'sizes': [2, 3], 'name': ('a',)}
    """
    if isinstance(value, Hole):
        return results[value.number]
    if type(value) is dict:
        return {key: fill(item, results) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(fill(item, results) for item in value)
    return value
