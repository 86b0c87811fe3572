"""How running trajectories leave a replica: a few at a time, so that each stands still only for a message.

One message of the scheduler names all that go from here to one target. They go in slices. The engine aborts those of
a slice, their states are pushed to the target, worker to worker, where they generate again at once; then their
tasks raise ``Reschedule`` and follow, with key and Future. The others generate here until it is their turn.
Where a push fails they go on here, with nothing lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from distributed import Worker
from distributed.protocol import to_serialize

from laminar.errors import LaminarError
from laminar.rollout.engine import Generated
from laminar_dask._compat import is_queued, run_id_of
from laminar_dask.attempts import Attempt
from laminar_dask.waiting import within

if TYPE_CHECKING:
    from laminar_dask.outbox import Outbox
    from laminar_dask.serving import Serving

__all__ = ["Departure", "Departures"]

logger = logging.getLogger(__name__)

SLICE = 4
"""Trajectories that go at once. Each stands still for as long as its slice takes; and what the scheduler has to place
again in one go stays small."""
PUSH_DEADLINE = 5.0
ABORT_DEADLINE = 30.0


class Departure:
    """One slice of trajectories on its way from here."""

    def __init__(self, keys: set[str]) -> None:
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
                await within(max(0.01, end - time.monotonic()), self.changed.wait())
            except TimeoutError:
                break
        for key in list(self.expected):
            self.stay(key, f"no answer of its engine in {ABORT_DEADLINE:.0f} s")


class Departures:
    """All hand-overs away from a replica.

    Parameters
    ----------
    attempts
        All trajectory tasks on this replica by key; the replica keeps it.
    serving
        What serves the engine; None before it is up.
    """

    def __init__(
        self,
        worker: Worker,
        outbox: Outbox,
        attempts: dict[str, Attempt],
        serving: Callable[[], Serving | None],
    ) -> None:
        self.worker = worker
        self.outbox = outbox
        self.attempts = attempts
        self.serving = serving
        self.tasks: set[asyncio.Task[None]] = set()
        worker.stream_handlers["laminar-handover"] = self.depart

    def depart(self, move: str, target: str, items: list[tuple[str, int]]) -> None:
        """Stream handler: these attempts ``(key, run_id)`` go to ``target``."""
        self._background(self._hand_over(move, target, items))

    async def _hand_over(self, move: str, target: str, items: Sequence[tuple[str, int]]) -> None:
        """Connect first, while all of them still generate; then slice by slice."""
        try:
            there, done = await self._push(move, target, []) is not None, 0
            while there and done < len(items):
                part, done = items[done : done + SLICE], done + SLICE
                there = await self._slice(move, target, part, last=done >= len(items))
            if done < len(items):
                self._report(move, kept=[(key, "target_lost") for key, _ in items[done:]], last=True)
        except Exception:
            logger.exception("hand-over %s to %s", move, target)

    async def _slice(self, move: str, target: str, items: Sequence[tuple[str, int]], *, last: bool) -> bool:
        """Hand a few over, and tell the scheduler; False if the target did not take them."""
        began = time.perf_counter()
        departure = Departure({key for key, _ in items})
        for key, run_id in items:
            self._ask_to_leave(departure, key, run_id)
        await departure.complete()
        states = list(departure.states.values())
        if items := self._unsent(states):
            self._background(self._flush(items))
        going = await self._push(move, target, states) if states else []
        kept = list(departure.kept.items())
        if going is None:
            kept += [(key, "target_lost") for key in departure.states]
        self._report(
            move,
            moved=[] if going is None else list(departure.states),
            going=going or [],
            kept=kept,
            seconds=time.perf_counter() - began,
            last=last,
        )
        departure.moved.set_result(going is not None)
        return going is not None

    def _ask_to_leave(self, departure: Departure, key: str, run_id: int) -> None:
        attempt, serving = self.attempts.get(key), self.serving()
        if attempt is None:
            departure.stay(key, "not_started" if is_queued(self.worker, key) else "ended")
        elif run_id_of(self.worker, key) != run_id:
            departure.stay(key, "superseded")
        elif attempt.phase == "scoring":
            departure.stay(key, "ended")
        elif attempt.departure is not None:
            departure.stay(key, "leaving")
        else:
            attempt.departure = departure
            attempt.moving.set()
            if attempt.phase == "generating" and serving is not None:
                serving.engine.abort(attempt.request.id)

    async def _push(self, move: str, target: str, states: list[dict[str, Any]]) -> list[str] | None:
        """Give states to the target; the keys that generate there already, None if it did not take them."""
        try:
            push = self.worker.rpc(target).laminar_adopt(move=move, states=to_serialize(states))
            going: list[str] | None = await within(PUSH_DEADLINE, push)
        except OSError as error:
            logger.warning("%d trajectories stay: %s took none (%s)", len(states), target, error)
            return None
        return going

    def _report(
        self,
        move: str,
        *,
        kept: list[tuple[str, str]],
        last: bool,
        moved: Sequence[str] = (),
        going: Sequence[str] = (),
        seconds: float = 0.0,
    ) -> None:
        report = {"move": move, "moved": moved, "going": going, "kept": kept, "seconds": seconds, "last": last}
        self.worker.batched_send({"op": "laminar-handed", **report})

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
        state: dict[str, Any] = partial or {"version": attempt.version, "ids": [], "logprobs": [], "waits_until": 0.0}
        if generated is not None:
            state = {
                "version": attempt.version,
                "ids": list(generated.ids),
                "logprobs": list(generated.logprobs),
                "waits_until": generated.waits_until,
            }
        key = attempt.request.key
        return {
            "waits_until": 0.0,
            **state,
            "ids": list(state["ids"]),
            "logprobs": list(state["logprobs"]),
            "key": key,
            "request": attempt.request,
            "run_id": run_id_of(self.worker, key),
            "migrations": attempt.migrations + 1,
        }
