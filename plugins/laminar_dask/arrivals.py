"""How trajectories arrive on a replica that were moved here.

Their states come first, from the replica that they leave. Where the version that began them is served now they
generate at once, and their tasks, which Dask places one after the other, take over what runs already. Nothing counts
and nothing is streamed before that: a trajectory whose task does not come was never here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed import Worker

from laminar_dask.attempts import Attempt

__all__ = ["Arrival", "Arrivals"]

WAIT_SECONDS = 60.0
"""How long a state waits for its task."""


@dataclass
class Arrival:
    """A state that was pushed here. ``attempt`` generates already; None if the task has to begin it."""

    state: dict[str, Any]
    move: str
    attempt: Attempt | None = None

    @property
    def partial(self) -> dict[str, Any] | None:
        """What to go on with; None if it had not begun."""
        return self.state if self.state["ids"] or self.state["waits_until"] else None


class Arrivals:
    """States that wait for their tasks.

    Parameters
    ----------
    begin
        Puts an attempt into the engine if it can generate now; whether it could.
    end
        Takes it out again; nobody came for it.
    now
        The clock of ``moved_at``: engine seconds.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        begin: Callable[[Attempt, dict[str, Any]], bool],
        end: Callable[[Attempt], None],
        now: Callable[[], float],
    ) -> None:
        self.begin = begin
        self.end = end
        self.now = now
        self.waiting: dict[str, Arrival] = {}
        worker.handlers["laminar_adopt"] = self.adopt
        worker.stream_handlers["laminar-disown"] = self.disown

    def adopt(self, move: str, states: list[dict[str, Any]]) -> list[str]:
        """RPC of another replica: trajectories whose tasks are about to come. The keys that generate now."""

        keys = [state["key"] for state in states]
        for key, state in zip(keys, states, strict=True):
            self._drop(key)  # of an earlier push
            self._receive(Arrival(state, move))
        asyncio.get_running_loop().call_later(WAIT_SECONDS, self.disown, move, keys)
        return [key for key in keys if self.waiting[key].attempt is not None]

    def _receive(self, arrival: Arrival) -> None:
        state = arrival.state
        self.waiting[state["key"]] = arrival
        if arrival.partial is None:
            return
        attempt = Attempt(state["request"], version=state["version"])
        attempt.migrations, attempt.moved_at = state["migrations"], self.now()
        if self.begin(attempt, arrival.partial):
            arrival.attempt = attempt

    def take(self, key: str, run_id: int) -> Arrival | None:
        """What was pushed for this attempt of a task; a state of a later one than this is not for it."""
        arrival = self.waiting.get(key)
        if arrival is None or arrival.state["run_id"] >= run_id:
            return None
        return self.waiting.pop(key)

    def disown(self, move: str, keys: list[str]) -> None:
        """Stream handler: these tasks will not come."""
        for key in keys:
            arrival = self.waiting.get(key)
            if arrival is not None and arrival.move == move:
                self._drop(key)

    def _drop(self, key: str) -> None:
        arrival = self.waiting.pop(key, None)
        if arrival is not None and arrival.attempt is not None:
            self.end(arrival.attempt)
