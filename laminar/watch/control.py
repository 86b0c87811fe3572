"""What a run is told from outside, by events of its scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["BEGIN", "STOP", "control_topic", "stop_wanted"]

BEGIN: dict[str, Any] = {"action": "begin"}
"""A run begins, or goes on, on a scheduler that may remember what it was told before."""
STOP: dict[str, Any] = {"action": "stop"}
"""No new trajectories, drain, checkpoint, end."""


def control_topic(run_id: str) -> str:
    """Topic on which a run is told."""
    return f"laminar-control-{run_id}"


def stop_wanted(events: Iterable[tuple[float, Mapping[str, Any]]]) -> bool:
    """Whether a run was asked to stop since it last began.

    Parameters
    ----------
    events
        (unix seconds, event), as Dask's ``get_events`` gives them.

    Example
    -------
    >>> stop_wanted([(1.0, BEGIN), (2.0, STOP)]), stop_wanted([(2.0, STOP), (3.0, BEGIN)]), stop_wanted([])
    (True, False, False)
    """
    *_, (_, last) = [(0.0, BEGIN), *events]
    return bool(last["action"] == STOP["action"])
