"""How much better each answer was than the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["group_advantages", "groups_without_signal"]

_EPSILON = 1e-6
"""Keeps rewards that differ only by rounding from being blown up to advantages of size 1."""


def group_advantages(
    rewards: npt.ArrayLike, group_ids: Sequence[str], *, scale: Literal["std", "none"] = "std"
) -> npt.NDArray[np.float64]:
    """Advantage of each row: its reward minus its group's mean, over its group's standard deviation.

    Groups are told apart by id, never by position: rows come in any order and groups have any size, since
    rows that could not be scored are missing.

    Parameters
    ----------
    rewards
        ``[rows]``, finite.
    group_ids
        ``[rows]``.
    scale
        ``"std"`` divides by the (population) standard deviation of the group, ``"none"`` does not.

    Returns
    -------
    ``[rows]``. Exactly 0 for all rows of a group whose rewards are equal, and for a row alone in its group.

    Notes
    -----
    ``"std"``: DeepSeekMath (arXiv 2402.03300), section 4.1.2. ``"none"``: "Understanding R1-Zero-Like
    Training" (arXiv 2503.20783), section 3.2, where the division favours too easy and too hard prompts.

    Example
    -------
    >>> group_advantages([1, 5, 0, 5], ["a", "b", "a", "b"]).round(3).tolist()
    [1.0, 0.0, -1.0, 0.0]
    >>> group_advantages([4, 0, 0, 7], ["a", "a", "a", "b"], scale="none").round(3).tolist()
    [2.667, -1.333, -1.333, 0.0]
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(group_ids),):
        raise ValueError(f"{values.shape} rewards for {len(group_ids)} group ids")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite; {int((~np.isfinite(values)).sum())} of {len(values)} are not")
    group, count = _numbered(group_ids)
    sizes = np.bincount(group, minlength=count)
    mean = np.bincount(group, weights=values, minlength=count) / sizes
    centred = np.where(_equal(values, group, count)[group], 0.0, values - mean[group])
    if scale == "none":
        return centred
    std = np.sqrt(np.bincount(group, weights=centred**2, minlength=count) / sizes)
    return centred / (std + _EPSILON)[group]


def groups_without_signal(rewards: npt.ArrayLike, group_ids: Sequence[str]) -> int:
    """How many groups teach nothing, all of their rewards being equal.

    Example
    -------
    >>> groups_without_signal([1, 0, 1, 1], ["a", "a", "b", "b"])
    1
    """
    group, count = _numbered(group_ids)
    return int(_equal(np.asarray(rewards, dtype=np.float64), group, count).sum())


def _numbered(group_ids: Sequence[str]) -> tuple[npt.NDArray[np.intp], int]:
    """Each row's group as a number, and how many groups there are."""
    names, group = np.unique(np.asarray(group_ids, dtype=np.str_), return_inverse=True)
    return group.reshape(-1), len(names)


def _equal(values: npt.NDArray[np.float64], group: npt.NDArray[np.intp], count: int) -> npt.NDArray[Any]:
    """Whether the rewards of each group are all the same."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return np.asarray(low == high)
