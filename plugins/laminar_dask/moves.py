"""Scheduler half of a hand-over: which trajectories are on their way, and where Dask may place them next.

A key that moves is restricted to its target, loosely, so that a target that dies is no dead end; what the user had
restricted comes back as soon as it is placed or stays. Attempts are fenced by Dask's ``run_id``.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler

__all__ = ["Bulk", "Moves"]

BULK_DEADLINE = 60.0
"""Seconds after which a hand-over that is not over is given up; its trajectories go on wherever they are."""
REMEMBERED = 10_000
"""Durations of hand-overs that are kept for statistics."""


@dataclass
class Bulk:
    """One hand-over of trajectories from ``source`` to ``target`` (addresses)."""

    id: str
    source: str
    target: str
    why: str
    left: set[str]
    """Keys of which it is not known yet where they are."""
    began: float
    plan: int | None = None
    """Number of the plan that it is part of; None if somebody asked for it."""
    moved: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)
    """Those that generated on the target before their task was there."""
    handed: bool = False
    """Whether the source has answered for all of them."""
    seconds: list[float] = field(default_factory=list)
    """For which each generated nowhere."""

    @property
    def emptied(self) -> bool:
        """Whether nothing of it still generates on the source."""
        return self.handed and all(why == "ended" for why in self.kept.values())


class Moves:
    """All hand-overs in flight.

    Parameters
    ----------
    on_handed, on_over
        Called with a bulk when the source has let go of it, and when all of it is settled.
    """

    def __init__(
        self, scheduler: Scheduler, *, on_handed: Callable[[Bulk], None], on_over: Callable[[Bulk], None]
    ) -> None:
        self.scheduler = scheduler
        self.on_handed = on_handed
        self.on_over = on_over
        self.bulks: dict[str, Bulk] = {}
        self.of_key: dict[str, Bulk] = {}
        self.original: dict[str, tuple[Any, Any]] = {}
        self.count = 0
        self.seconds: deque[float] = deque(maxlen=REMEMBERED)
        """For which a trajectory that was moved generated nowhere."""
        self.placed: deque[float] = deque(maxlen=REMEMBERED)
        """From the request until its task ran on the target."""
        self._serial = itertools.count(1)

    def busy(self, address: str) -> bool:
        """Whether a worker takes part in a hand-over now."""
        return any(address in (bulk.source, bulk.target) for bulk in self.bulks.values())

    def begin(
        self, source: str, target: str, items: Iterable[tuple[str, int]], why: str, *, plan: int | None = None
    ) -> Bulk | None:
        """Ask ``source`` to hand over; None if nothing of it can move any more."""
        good = []
        for key, run_id in items:
            task = self.scheduler.tasks.get(key)
            on = None if task is None or task.state != "processing" else task.processing_on
            if on is None or on.address != source or task.run_id != run_id or key in self.of_key:
                continue  # it ended, moved, or began again since we looked
            good.append((key, run_id))
        if not good or target not in self.scheduler.workers or source not in self.scheduler.workers:
            return None
        left = {key for key, _ in good}
        bulk = Bulk(f"move-{next(self._serial)}", source, target, why, left, time.time(), plan)
        self.bulks[bulk.id] = bulk
        for key, _ in good:
            self.of_key[key] = bulk
            task = self.scheduler.tasks[key]
            self.original.setdefault(key, (task.worker_restrictions, task.loose_restrictions))
            task.worker_restrictions, task.loose_restrictions = {target}, True
        self.scheduler.worker_send(source, {"op": "laminar-handover", "move": bulk.id, "target": target, "items": good})
        return bulk

    # -- what the workers say -------------------------------------------------------------------------------

    def handed(
        self, move: str, moved: list[str], going: list[str], kept: list[tuple[str, str]], seconds: float, last: bool
    ) -> None:
        """The source has let go of ``moved``, some of which are ``going`` on already after ``seconds``; ``kept``
        stay, each with the reason. More is to come unless it is the ``last``."""
        bulk = self.bulks.get(move)
        if bulk is None:
            return
        bulk.handed = last
        bulk.moved.update(moved)
        bulk.going.update(going)
        bulk.kept.update(kept)
        self.count += len(moved)
        self._took(bulk, [seconds] * len(going))
        for key, why in kept:
            if why == "not_started":
                self._steal(key, bulk)
            else:
                self._restore(key)
        self._disown(bulk, [key for key, why in kept if why == "target_lost"])
        if last:
            self.on_handed(bulk)
        for key, _ in kept:
            self._settle(key)
        self._over_if_done(bulk)

    def resumed(self, key: str) -> None:
        """A trajectory's task runs on its target."""
        bulk = self.of_key.get(key)
        if bulk is None or key not in bulk.moved:
            return
        seconds = time.time() - bulk.began
        self.placed.append(seconds)
        if key not in bulk.going:
            self._took(bulk, [seconds])
        self._settle(key)

    def _took(self, bulk: Bulk, seconds: list[float]) -> None:
        bulk.seconds += seconds
        self.seconds.extend(seconds)

    def _disown(self, bulk: Bulk, keys: list[str]) -> None:
        """Tell the target that these tasks will not come, should it have begun them."""
        if keys and bulk.target in self.scheduler.workers:
            message = {"op": "laminar-disown", "move": bulk.id, "keys": keys}
            self.scheduler.worker_send(bulk.target, message)

    def _steal(self, key: str, bulk: Bulk) -> None:
        """A task that its worker has not begun is moved by work stealing's own request and answer."""
        stealing, task = self.scheduler.extensions.get("stealing"), self.scheduler.tasks.get(key)
        thief = self.scheduler.workers.get(bulk.target)
        self._restore(key)
        if stealing is not None and task is not None and task.processing_on is not None and thief is not None:
            stealing.move_task_request(task, task.processing_on, thief)

    # -- what the scheduler says ------------------------------------------------------------------------------

    def transition(self, key: Any, finish: str) -> None:
        """A trajectory is to be placed, was placed, or ended."""
        if finish == "waiting":  # new or released: the next step chooses its worker
            self._unpin(key)
        elif finish == "processing":
            self._restore(key)
            self._placed(key)
        elif finish in ("memory", "erred", "forgotten"):
            self.original.pop(key, None)
            self._end(key)

    def _placed(self, key: str) -> None:
        bulk, task = self.of_key.get(key), self.scheduler.tasks.get(key)
        if bulk is None or task is None or task.processing_on is None:
            return
        if task.processing_on.address != bulk.target:
            self._end(key)  # its target is gone: it goes on from the partial pool

    def _end(self, key: str) -> None:
        """Its task does not come to the target any more."""
        bulk = self.of_key.get(key)
        if bulk is not None:
            self._disown(bulk, [key])
            self._settle(key)

    def remove_worker(self, address: str) -> None:
        """A worker is gone. Its tasks are placed again by Dask and go on from the partial pool."""
        for bulk in list(self.bulks.values()):
            if address in (bulk.source, bulk.target):
                self._close(bulk)

    def expire(self) -> None:
        """Give up what takes too long."""
        for bulk in list(self.bulks.values()):
            if time.time() - bulk.began > BULK_DEADLINE:
                self._close(bulk)

    def _unpin(self, key: str) -> None:
        """Its worker is gone or going: any replica may take it. (Dask would take any worker, whatever its role.)"""
        task = self.scheduler.tasks.get(key)
        if task is None or not task.worker_restrictions:
            return
        running = {state.address for state in self.scheduler.running}
        if not running & set(task.worker_restrictions):
            task.worker_restrictions, task.loose_restrictions = None, False
            self.original.pop(key, None)

    def _restore(self, key: str) -> None:
        before, task = self.original.pop(key, None), self.scheduler.tasks.get(key)
        if before is not None and task is not None:
            task.worker_restrictions, task.loose_restrictions = before

    def _settle(self, key: str) -> None:
        bulk = self.of_key.pop(key, None)
        if bulk is None:
            return
        bulk.left.discard(key)
        self._over_if_done(bulk)

    def _over_if_done(self, bulk: Bulk) -> None:
        if bulk.handed and not bulk.left:
            self._over(bulk)

    def _close(self, bulk: Bulk) -> None:
        for key in bulk.left:
            self.of_key.pop(key, None)
            task = self.scheduler.tasks.get(key)
            if task is None or task.state == "processing":
                self._restore(key)
        bulk.left.clear()
        self._over(bulk)

    def _over(self, bulk: Bulk) -> None:
        if self.bulks.pop(bulk.id, None) is not None:
            self.on_over(bulk)
