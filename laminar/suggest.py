"""The nearest valid name, for messages about a name that is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "listed", "nearest"]


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like ``name``, or None where none is near.

    Example
    -------
    >>> nearest("chain_sums", ["chain_sum", "maze"])
    'chain_sum'
    """
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid name, or nothing where none is near.

    Example
    -------
    >>> did_you_mean("chain_sums", ["chain_sum", "maze"])
    "; did you mean 'chain_sum'?"
    >>> did_you_mean("zebra", ["chain_sum", "maze"])
    ''
    """
    found = nearest(name, valid)
    return f"; did you mean '{found}'?" if found else ""


def listed(names: Iterable[str], *, most: int = 12) -> str:
    """Names for a message: the first ``most`` of them, and how many more.

    Example
    -------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
