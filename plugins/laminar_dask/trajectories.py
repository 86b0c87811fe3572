"""How trajectories become Dask tasks."""

from __future__ import annotations

from collections.abc import Sequence

from distributed import Client, Future

from laminar.trajectory import TrajectoryRequest
from laminar_dask.replica import trajectory

__all__ = ["cancel", "submit"]

AT_ONCE = 64
"""Tasks in one message, so that the scheduler's loop turns to others in between."""


def submit(client: Client, requests: Sequence[TrajectoryRequest], *, near: str | None = None) -> list[Future]:
    """One task a trajectory, under its key.

    Parameters
    ----------
    near
        Address of the replica that should take them; any other may where that one is gone.
    """
    placement = {"workers": [near], "allow_other_workers": True} if near is not None else {}
    futures: list[Future] = []
    for start in range(0, len(requests), AT_ONCE):
        part = requests[start : start + AT_ONCE]
        keys = [request.key for request in part]
        futures += client.map(trajectory, part, key=keys, resources={"rollout": 1}, pure=False, **placement)
    return futures


async def cancel(client: Client, futures: Sequence[Future]) -> None:
    """Nobody wants these any more. A few at a time: the scheduler's effort grows with the square of their number."""
    for start in range(0, len(futures), AT_ONCE):
        await client.cancel(futures[start : start + AT_ONCE], force=True)
