"""Worker half of repack: what a replica says of its load, and how running trajectories leave it and arrive.

A hand-over is in bulk, one message a source and target. The source aborts the trajectories in its engine, pushes
their states to the target, worker to worker, flushes their last tokens to the partial pool, and only then lets
their tasks raise ``Reschedule``: key and Future stay. Where the push fails they go on here, with nothing lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from distributed import Worker

from laminar.errors import LaminarError
from laminar.repack import NEVER, Idleness
from laminar.rollout.engine import Generated
from laminar.rollout.latency import LatencyMeter
from laminar.trajectory import TrajectoryRequest, Version
from laminar_dask._compat import run_id_of

if TYPE_CHECKING:
    from laminar_dask.outbox import Outbox
    from laminar_dask.serving import Serving

__all__ = ["Attempt", "Departure", "HandedOver", "Handover"]

logger = logging.getLogger(__name__)

PUSH_DEADLINE = 5.0
ABORT_DEADLINE = 30.0
FINISHED = 10_000
"""Lengths that are kept until somebody looks."""
ADOPTED_SECONDS = 60.0
"""How long a pushed state waits for its task."""

Phase = Literal["waiting", "generating", "scoring"]


class HandedOver(Exception):
    """A trajectory is somebody else's now."""


@dataclass
class Attempt:
    """One trajectory task on this replica, from its start to its end here."""

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


class Departure:
    """One bulk of trajectories on its way from here to ``target``."""

    def __init__(self, move: str, target: str, keys: set[str]) -> None:
        self.move = move
        self.target = target
        self.expected = set(keys)
        self.states: dict[str, dict[str, Any]] = {}
        self.kept: dict[str, str] = {}
        self.changed = asyncio.Event()
        self.moved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def leave(self, key: str, state: dict[str, Any]) -> bool:
        """Give up a trajectory's state; True once the target has it, False if it has to go on here."""
        self.states[key] = state
        self._answered(key)
        return await asyncio.shield(self.moved) and key in self.states

    def stay(self, key: str, why: str) -> None:
        """It does not go: it ended meanwhile, or is unknown."""
        self.kept[key] = why
        self._answered(key)

    def ended(self, key: str) -> None:
        """It finished, failed or was cancelled before it could go."""
        if key in self.expected:
            self.stay(key, "ended")

    def _answered(self, key: str) -> None:
        self.expected.discard(key)
        self.changed.set()

    async def complete(self) -> None:
        """Until every trajectory has answered, at most ``ABORT_DEADLINE`` seconds."""
        end = time.monotonic() + ABORT_DEADLINE
        while self.expected and time.monotonic() < end:
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), max(0.01, end - time.monotonic()))
            except TimeoutError:
                break
        for key in list(self.expected):
            self.stay(key, f"no answer of its engine in {ABORT_DEADLINE:.0f} s")


class Handover:
    """A replica's part in repack.

    Parameters
    ----------
    attempts
        All trajectory tasks on this replica by key; the replica keeps it.
    collect
        Brings their ``tokens`` up to now.
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
        collect: Callable[[], None],
        count: Callable[[Any], int],
        time_scale: float,
    ) -> None:
        self.worker = worker
        self.outbox = outbox
        self.attempts = attempts
        self.collect = collect
        self.count = count
        self.time_scale = time_scale
        self.serving: Serving | None = None
        self.prefill_rate = 0.0
        self.meter = LatencyMeter()
        self.idleness = Idleness()
        self.filled = 0
        self.finished: deque[tuple[str, str, int, int]] = deque(maxlen=FINISHED)
        self.adopted: dict[str, tuple[float, dict[str, Any]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        worker.stream_handlers["laminar-handover"] = self.depart
        worker.handlers["laminar_adopt"] = self.adopt
        worker.handlers["laminar_repack_look"] = self.look

    # -- what the scheduler asks ------------------------------------------------------------------------

    def look(self, detail: bool = False) -> dict[str, Any] | None:
        """Gauges, what finished since the last look, and, of an idle replica, its unfinished trajectories."""
        if self.serving is None:
            return None
        self.collect()
        gauges = self.serving.engine.gauges()
        waiting = gauges.waiting + self.serving.waiting
        self.idleness = self.idleness.after(
            kv_used=gauges.kv_used, kv_total=gauges.kv_total, waiting=waiting, filled=self.filled
        )
        finished = list(self.finished)
        self.finished.clear()
        generating = {key: a for key, a in self.attempts.items() if a.phase == "generating" and a.departure is None}
        shown = generating if self.idleness.idle or detail else {}
        return {
            "version": self.serving.engine.version,
            "state": self.serving.state,
            "waiting": waiting,
            "kv_total": gauges.kv_total,
            "idle": self.idleness.idle,
            "running": len(generating),
            "kv_used": gauges.kv_used,
            "finished": finished,
            "latency": self.meter.points(),
            "prefill_rate": self.prefill_rate,
            "trajectories": [
                (
                    key,
                    run_id_of(self.worker, key),
                    a.request.group,
                    a.request.group_size,
                    self.count(a.request.prompt_ids),
                    a.tokens,
                    a.moved_at,
                )
                for key, a in shown.items()
            ],
        }

    # -- leaving ----------------------------------------------------------------------------------------

    def depart(self, move: str, target: str, items: list[tuple[str, int]]) -> None:
        """Stream handler: these attempts go to ``target``. An error here would close the worker's stream."""
        try:
            departure = Departure(move, target, {key for key, _ in items})
            for key, run_id in items:
                self._ask_to_leave(departure, key, run_id)
            self._background(self._push(departure))
        except Exception:
            logger.exception("hand-over %s to %s was not begun", move, target)

    def _ask_to_leave(self, departure: Departure, key: str, run_id: int) -> None:
        attempt = self.attempts.get(key)
        if attempt is None:
            departure.stay(key, "not_started" if key in self.worker.state.tasks else "ended")
        elif run_id_of(self.worker, key) != run_id:
            departure.stay(key, "superseded")
        elif attempt.phase == "scoring":
            departure.stay(key, "ended")
        elif attempt.departure is not None:
            departure.stay(key, "leaving")
        else:
            attempt.departure = departure
            attempt.moving.set()
            if attempt.phase == "generating" and self.serving is not None:
                self.serving.engine.abort(attempt.request.id)

    async def _push(self, departure: Departure) -> None:
        """When all have answered, send their states, then let them go."""
        await departure.complete()
        states = list(departure.states.values())
        moved = False
        if items := self._unsent(states):
            self._background(self._flush(items))
        try:
            if states:
                push = self.worker.rpc(departure.target).laminar_adopt(states=states)
                moved = bool(await asyncio.wait_for(push, PUSH_DEADLINE))
        except OSError as error:
            logger.warning("%d trajectories stay: %s took none (%s)", len(states), departure.target, error)
        kept = dict(departure.kept)
        if not moved:
            kept.update(dict.fromkeys(departure.states, "target_lost"))
        report = {
            "op": "laminar-handed",
            "move": departure.move,
            "moved": list(departure.states) if moved else [],
            "kept": list(kept.items()),
        }
        self.worker.batched_send(report)
        departure.moved.set_result(moved)

    async def _flush(self, items: list[Any]) -> None:
        try:
            await self.outbox.partials(items)
        except (OSError, LaminarError) as error:  # only a death before their end would cost these tokens
            logger.warning("the last tokens of %d moved trajectories were not streamed: %s", len(items), error)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _unsent(self, states: list[dict[str, Any]]) -> list[Any]:
        """Tokens that the partial pool may not have yet, so that a death on the way costs nothing."""
        items = []
        for state in states:
            attempt = self.attempts.get(state["key"])
            if attempt is None or attempt.request.purpose != "train" or not state["ids"]:
                continue
            start = min(attempt.streamed, len(state["ids"]))
            ids, logprobs = state["ids"][start:], state["logprobs"][start:]
            if ids:
                items.append([attempt.request.id, state["run_id"], state["version"], start, ids, logprobs])
        return items

    def state_of(self, attempt: Attempt, partial: dict[str, Any] | None, generated: Generated | None) -> dict[str, Any]:
        """What the target needs to go on: what was ``generated`` here, else the ``partial`` that it came with."""
        key = attempt.request.key
        state: dict[str, Any] = partial or {"version": attempt.version, "ids": [], "logprobs": [], "waits_until": 0.0}
        if generated is not None:
            state = {
                "version": attempt.version,
                "ids": list(generated.ids),
                "logprobs": list(generated.logprobs),
                "waits_until": generated.waits_until,
            }
        waits = state.get("waits_until", 0.0)
        run_id = run_id_of(self.worker, key)
        state = {**state, "ids": list(state["ids"]), "logprobs": list(state["logprobs"]), "waits_until": waits}
        return {**state, "key": key, "run_id": run_id, "migrations": attempt.migrations + 1}

    # -- arriving ---------------------------------------------------------------------------------------

    def adopt(self, states: list[dict[str, Any]]) -> bool:
        """RPC of another replica: states of trajectories whose tasks are about to come here."""
        now = time.monotonic()
        self.adopted = {key: kept for key, kept in self.adopted.items() if now - kept[0] < ADOPTED_SECONDS}
        for state in states:
            self.adopted[state["key"]] = (now, state)
        return True

    def arrival(self, key: str, run_id: int) -> dict[str, Any] | None:
        """The state that was pushed for this attempt; one of a later attempt than this is not for it."""
        kept = self.adopted.pop(key, None)
        return kept[1] if kept is not None and kept[1]["run_id"] < run_id else None

    def arrived(self, key: str) -> None:
        """It generates here now."""
        self.worker.batched_send({"op": "laminar-resumed", "key": key, "at": time.time()})

    def now(self) -> float:
        """The clock of ``moved_at``: engine seconds."""
        return time.time() * self.time_scale
