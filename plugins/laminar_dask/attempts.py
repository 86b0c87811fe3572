"""A trajectory on a replica: the attempt that runs here now, from its start to its end here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from laminar.repack import NEVER
from laminar.rollout.engine import Generated
from laminar.trajectory import TrajectoryRequest, Version

if TYPE_CHECKING:
    from laminar_dask.departures import Departure

__all__ = ["Attempt", "HandedOver", "Phase"]

Phase = Literal["waiting", "generating", "scoring"]


class HandedOver(Exception):
    """A trajectory is somebody else's now."""


@dataclass
class Attempt:
    """One attempt. It is made by the trajectory's task, or, of one that was moved here, before its task comes."""

    request: TrajectoryRequest
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    moving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has to leave while it is not in the engine."""
    phase: Phase = "waiting"
    version: Version = 0
    tokens: int = 0
    """Of the response, as far as known."""
    streamed: int = 0
    """Ids that the partial pool has acknowledged."""
    migrations: int = 0
    moved_at: float = NEVER
    departure: Departure | None = None
    generating: asyncio.Future[Generated] | None = None
    """What the engine will answer, while it is in there."""
