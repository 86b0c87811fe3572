"""An engine that serves one weight version at a time: the asyncio half of ``laminar.rollout.gate``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from laminar.errors import LaminarError, RunFailed
from laminar.rollout.engine import Engine, Generated, Generation
from laminar.rollout.gate import Want, decide
from laminar.trajectory import Version
from laminar_dask.versions import VersionSource
from laminar_dask.waiting import within

__all__ = ["Cancelled", "Leaving", "Serving", "VersionGone"]

POLL_SECONDS = 0.02
"""How often a waiting replica looks at the relay's head word: reading it costs microseconds."""
WEIGHTS_DEADLINE = 300.0


class Cancelled(LaminarError):
    """Nobody wants the trajectory any more."""


class VersionGone(Exception):
    """The one version that may finish a trajectory is held by no relay slot any more."""


class Leaving(Exception):
    """It is to go on elsewhere, and had not begun here."""


@dataclass
class Ticket:
    """One trajectory at the gate."""

    want: Want
    admitted: asyncio.Future[Version]


class Serving:
    """Admits trajectories to an engine and swaps its weights when nothing runs."""

    def __init__(self, engine: Engine, source: VersionSource) -> None:
        self.engine = engine
        self.source = source
        self.queue: list[Ticket] = []
        self.inside = 0
        self.state = "idle"
        self.changed = asyncio.Event()
        self.pump: asyncio.Task[None] | None = None
        self._busy = 0.0
        self._progress = time.monotonic()
        """When somebody last left, or a version was loaded: until ``WEIGHTS_DEADLINE`` after it nothing is amiss."""
        self._busy_since: float | None = None

    @property
    def waiting(self) -> int:
        """Trajectories at the gate."""
        return len(self.queue)

    def alive(self) -> bool:
        """Whether the engine still generates."""
        return self.engine.alive()

    def busy_seconds(self) -> float:
        """Seconds in which at least one trajectory was being generated."""
        now = time.monotonic() - self._busy_since if self._busy_since is not None else 0.0
        return self._busy + now

    def newest(self) -> Version | None:
        """Newest version of the host's relay; None before there is one."""
        return self.source.newest()

    # -- the gate -----------------------------------------------------------------------------------------

    async def enter(self, want: Want, cancelled: asyncio.Event, moving: asyncio.Event) -> Version:
        """Wait for the turn; returns the version that will generate. Every ``enter`` needs one ``leave``.

        Raises
        ------
        VersionGone
            ``want.exactly`` can no longer be loaded.
        Leaving
            ``moving`` was set before its turn came.
        """
        ticket = Ticket(want, asyncio.get_running_loop().create_future())
        self.queue.append(ticket)
        self.changed.set()
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self._pump())
        gone, leaving = asyncio.ensure_future(cancelled.wait()), asyncio.ensure_future(moving.wait())
        began = time.monotonic()
        try:
            done: set[asyncio.Future[Any]] = set()
            while not done and (left := self._patience(began)) > 0:
                waiting = {ticket.admitted, gone, leaving}
                done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if ticket.admitted.done():
                return ticket.admitted.result()
            if moving.is_set():
                raise Leaving
            if cancelled.is_set():
                raise Cancelled("cancelled while it waited for its turn")
            raise RunFailed(
                f"no weights for {want} after {WEIGHTS_DEADLINE:.0f} s: the relay holds {self.source.held()}, "
                f"the engine serves {self.engine.version}, {self.inside} trajectories run"
            )
        finally:
            gone.cancel()
            leaving.cancel()
            if not ticket.admitted.done():
                ticket.admitted.cancel()
                self.queue.remove(ticket)

    def _patience(self, began: float) -> float:
        """Seconds that a wait may go on: one has its reason in trajectories that run (each has its deadline), in a
        load, and else in what last went on."""
        if self.inside > 0 or self.state == "loading":
            return WEIGHTS_DEADLINE
        return max(began, self._progress) + WEIGHTS_DEADLINE - time.monotonic()

    def join(self, version: Version) -> bool:
        """Let one in at once that ``version`` has begun; False if another one is served or being loaded. It
        needs a ``leave`` as after ``enter``."""
        if self.engine.version != version or self.state == "loading":
            return False
        self._count_in()
        return True

    def leave(self) -> None:
        """One trajectory is out of the engine."""
        self.inside -= 1
        self._progress = time.monotonic()
        if self.inside == 0 and self._busy_since is not None:
            self._busy += time.monotonic() - self._busy_since
            self._busy_since, self.state = None, "idle"
        self.changed.set()

    async def _pump(self) -> None:
        while self.queue:
            self.changed.clear()
            decision = decide(
                [ticket.want for ticket in self.queue],
                loaded=self.engine.version,
                running=self.inside,
                newest=self.newest(),
                held=self.source.held(),
            )
            if decision.gone:
                self.queue.pop(0).admitted.set_exception(VersionGone())
            elif decision.load is not None:
                await self._load(decision.load)
            elif decision.admit:
                for _ in range(decision.admit):
                    self._admit(self.queue.pop(0))
            else:
                try:
                    await within(POLL_SECONDS, self.changed.wait())
                except TimeoutError:
                    continue

    def _admit(self, ticket: Ticket) -> None:
        assert self.engine.version is not None
        self._count_in()
        ticket.admitted.set_result(self.engine.version)

    def _count_in(self) -> None:
        self.inside += 1
        if self._busy_since is None:
            self._busy_since, self.state = time.monotonic(), "generating"

    # -- weights ------------------------------------------------------------------------------------------

    async def _load(self, version: Version) -> None:
        self.state = "loading"
        try:
            await asyncio.to_thread(self.source.load, self.engine, version)
        except LookupError:
            pass  # overwritten since we looked: the next decision sees what is held now
        except Exception as error:  # noqa: BLE001 - a replica that cannot load fails its trajectories, with the reason
            for ticket in self.queue:
                ticket.admitted.set_exception(RunFailed(f"weights {version} could not be loaded: {error}"))
            self.queue.clear()
        self.state, self._progress = "idle", time.monotonic()

    # -- generating ---------------------------------------------------------------------------------------

    def begin(self, generation: Generation) -> asyncio.Future[Generated]:
        """Submit a request; its result.

        Raises
        ------
        ValueError, RuntimeError
            As the engine's ``submit``.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Generated] = loop.create_future()

        def finish(generated: Generated) -> None:
            loop.call_soon_threadsafe(lambda: result.done() or result.set_result(generated))

        self.engine.submit(generation, finish)
        return result

    async def finish(
        self, request: str, result: asyncio.Future[Generated], *, cancelled: asyncio.Event, deadline: float
    ) -> Generated:
        """Wait for a request that was begun; past the deadline it is aborted and comes back as an error.

        Raises
        ------
        Cancelled
            Nobody wants the result any more.
        """
        gone = asyncio.ensure_future(cancelled.wait())
        try:
            await asyncio.wait({result, gone}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            self.engine.abort(request)
            partial = await within(30, result)
            if cancelled.is_set():
                raise Cancelled(f"trajectory {request} was cancelled")
            return replace(partial, finish_reason="error", message=f"not finished after {deadline:.0f} s")
        finally:
            gone.cancel()

    async def close(self) -> None:
        """Stop the engine."""
        if self.pump is not None:
            self.pump.cancel()
        self.source.close()
        await asyncio.to_thread(self.engine.close)
