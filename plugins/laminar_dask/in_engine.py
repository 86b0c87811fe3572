"""The trajectories that are in a replica's engine: put in, taken out, and their new tokens told to the partial pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import Worker

from laminar.errors import LaminarError
from laminar.rollout.engine import Delta, Generation
from laminar.rollout.latency import LatencyMeter
from laminar_dask._compat import run_id_of
from laminar_dask.attempts import Attempt
from laminar_dask.serving import Serving

if TYPE_CHECKING:
    from laminar_dask.outbox import Outbox

__all__ = ["InEngine"]

logger = logging.getLogger(__name__)

STREAM_SECONDS = 0.25
"""How often new tokens of all running trajectories go to the partial pool."""
METER_SECONDS = 0.05
"""Shortest time between two looks at the engine that says how long a step takes."""
ABORT_DEADLINE = 30.0


class InEngine:
    """What generates on a replica.

    Parameters
    ----------
    attempts
        All trajectory tasks on this replica by key; the replica keeps it. One that generates and is not among them
        awaits its task.
    count
        Tokens that a sequence of ids stands for.
    time_scale
        Engine seconds in a real one.
    """

    def __init__(
        self,
        worker: Worker,
        outbox: Outbox,
        attempts: dict[str, Attempt],
        *,
        count: Callable[[Any], int],
        time_scale: float,
    ) -> None:
        self.worker = worker
        self.outbox = outbox
        self.attempts = attempts
        self.count = count
        self.time_scale = time_scale
        self.serving: Serving | None = None
        self.meter = LatencyMeter()
        self.running: dict[str, Attempt] = {}
        """By the trajectory's id."""
        self.unsent: list[Delta] = []
        self.collected = 0.0
        self.tokens = 0
        """Generated here in all."""

    def begin(self, serving: Serving, attempt: Attempt, partial: dict[str, Any] | None) -> None:
        """Put a trajectory that was let in into the engine."""
        request, prefix = attempt.request, tuple(partial["ids"]) if partial else ()
        attempt.tokens, attempt.streamed = self.count(prefix), len(prefix)
        attempt.generating = serving.begin(
            Generation(
                id=request.id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                prefix_ids=prefix,
                prefix_logprobs=tuple(partial["logprobs"]) if partial else (),
                waits_until=partial.get("waits_until", 0.0) if partial else 0.0,
            )
        )
        attempt.phase = "generating"
        self.running[request.id] = attempt

    def begin_at_once(self, attempt: Attempt, partial: dict[str, Any]) -> bool:
        """Let a trajectory generate whose task is still on its way; False if that has to wait for the task."""
        serving = self.serving
        if serving is None or attempt.request.id in self.running or not serving.join(attempt.version):
            return False
        try:
            self.begin(serving, attempt, partial)
        except (ValueError, RuntimeError) as error:  # its task will meet it again, and say so
            logger.info("trajectory %s did not begin at once: %s", attempt.request.id, error)
            serving.leave()
            return False
        return True

    def end_unclaimed(self, attempt: Attempt) -> None:
        """Nobody came for what was begun at once."""
        assert self.serving is not None and attempt.generating is not None
        self.unsent = [delta for delta in self.unsent if delta.id != attempt.request.id]
        attempt.generating.add_done_callback(lambda _: self.out(attempt))
        self.serving.engine.abort(attempt.request.id)

    async def until_out(self, request: str) -> None:
        """Until another attempt of the same trajectory, that is not wanted any more, is out of the engine."""
        other = self.running.get(request)
        if other is not None and other.generating is not None:
            await asyncio.wait({other.generating}, timeout=ABORT_DEADLINE)
            await asyncio.sleep(0)

    def out(self, attempt: Attempt) -> None:
        """A trajectory is out of the engine, whatever the reason."""
        assert self.serving is not None
        attempt.phase, attempt.generating = "waiting", None
        if self.running.get(attempt.request.id) is attempt:
            del self.running[attempt.request.id]
        self.serving.leave()

    async def stream(self) -> None:
        """Send new tokens of all running trajectories to the partial pool, a few times a second."""
        while True:
            await asyncio.sleep(STREAM_SECONDS)
            self.collect()
            deltas, self.unsent = self.unsent, []
            items, sent = [], []
            for delta in deltas:
                attempt = self.running.get(delta.id)
                if attempt is None or attempt.request.purpose != "train":
                    continue
                run_id = run_id_of(self.worker, attempt.request.key)
                if self.attempts.get(attempt.request.key) is not attempt:
                    self.unsent.append(delta)  # its task is still to come
                    continue
                items.append([delta.id, run_id, attempt.version, delta.start, list(delta.ids), list(delta.logprobs)])
                sent.append((attempt, delta.start + len(delta.ids)))
            if not items:
                continue
            try:
                await self.outbox.partials(items)
            except (OSError, LaminarError) as error:
                # The finished row carries all tokens; only a death before that would cost these.
                logger.warning("%d partial responses were not streamed: %s", len(items), error)
                continue
            for attempt, ids in sent:
                attempt.streamed = max(attempt.streamed, ids)

    def collect(self) -> None:
        """Take up what the engine has generated since the last time, and measure its steps by it."""
        if self.serving is None:
            return
        deltas, now = self.serving.engine.progress(), time.monotonic()
        new = 0
        for delta in deltas:
            tokens = self.count(delta.ids)
            new += tokens
            attempt = self.running.get(delta.id)
            if attempt is not None:
                attempt.tokens += tokens
                self.tokens += tokens
        if now - self.collected > METER_SECONDS:
            seconds = (now - self.collected) * self.time_scale
            self.meter.add(batch=len(deltas), tokens=new, seconds=seconds)
        self.collected = now
        self.unsent += deltas
