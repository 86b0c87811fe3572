"""Step 8: the scheduler plugin that looks at the replicas, plans by ``laminar.repack``, and moves the long tail.

Two triggers, a period and a published version; one plan at a time. It also serves ``laminar-flow repack`` and
``laminar-flow drain``. The trainer and the rollouts never wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from laminar.repack import Load, Plan, Release, Rules, plan
from laminar.watch.events import topic
from laminar_dask.collector import calm_collector
from laminar_dask.drain import TRAJECTORIES, ByHand
from laminar_dask.looks import Look, Looks
from laminar_dask.loop_lag import LoopLag
from laminar_dask.moves import Bulk, Moves
from laminar_dask.reviews import Reviews
from laminar_dask.waiting import within

__all__ = ["RepackPlugin", "RepackSettings", "freed_topic"]

logger = logging.getLogger(__name__)

SHORTEST_PERIOD = 0.1
"""Seconds between two looks at least, whatever the time scale."""


@dataclass(frozen=True)
class RepackSettings:
    """How a run repacks. Seconds are the engine's own (emulated ones where it is emulated).

    Parameters
    ----------
    cap
        Longest response in tokens.
    slots
        Most trajectories that a replica can run at all.
    period
        Seconds between two looks.
    margin, pause, overhead
        As in ``laminar.repack.Rules``.
    automatic
        Whether it plans by itself; moves by hand and drains work in any case.
    """

    run: str
    cap: int
    slots: int
    period: float = 5.0
    margin: float = 1.0
    pause: float = 30.0
    overhead: float = 1.5
    time_scale: float = 1.0
    automatic: bool = True


class RepackPlugin(SchedulerPlugin):
    """The scheduler half."""

    name = "laminar-repack"

    def __init__(self, settings: RepackSettings) -> None:
        self.settings = settings

    async def start(self, scheduler: Scheduler) -> None:
        """Answer calls, and begin to look."""
        self.scheduler = scheduler
        calm_collector()
        self.looks = Looks(scheduler, self.settings)
        self.moves = Moves(scheduler, on_handed=self._handed, on_over=self._over)
        self.reviews = Reviews()
        self.lag = LoopLag(going=lambda: bool(self.moves.bulks))
        self.counters: Counter[str] = Counter()
        self.plan_seconds = 0.0
        self.wanted: set[str] = set()
        self.trigger = asyncio.Event()
        self.by_hand = ByHand(self, scheduler)
        for call in (self.laminar_repack_published, self.laminar_repack_status):
            scheduler.handlers[call.__name__] = call
        scheduler.stream_handlers["laminar-handed"] = self._on_handed
        scheduler.stream_handlers["laminar-resumed"] = self._on_resumed
        before = scheduler.plugins.pop(self.name, None)  # of an earlier stage
        if isinstance(before, RepackPlugin):
            await before.close()
        self.task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Look no more."""
        self.task.cancel()

    # -- hooks of the scheduler: they must neither raise nor wait ----------------------------------------------

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        """Trajectories are placed, or end."""
        if str(key).startswith(TRAJECTORIES):
            self.moves.transition(key, finish)

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """A source or target is gone."""
        self.moves.remove_worker(worker)

    def _on_handed(self, move: str, worker: str, **answer: Any) -> None:
        try:  # an error in a stream handler would cost the worker its connection
            self.moves.handed(move, **answer)
        except Exception:
            logger.exception("hand-over %s", move)

    def _on_resumed(self, key: str, worker: str) -> None:
        try:
            self.moves.resumed(key)
        except Exception:
            logger.exception("hand-over of %s", key)

    # -- triggers ------------------------------------------------------------------------------------------------

    def laminar_repack_published(self, version: int) -> None:
        """RPC: the trainer has published; look now. Two triggers at once are one."""
        self.wanted.add("published")
        self.trigger.set()

    async def _run(self) -> None:
        period = max(SHORTEST_PERIOD, self.settings.period / self.settings.time_scale)
        while True:
            try:
                await within(period, self.trigger.wait())
            except TimeoutError:
                self.wanted.add("periodic")
            self.trigger.clear()
            why, self.wanted = "+".join(sorted(self.wanted)), set()
            try:
                await self.look_and_plan(why)
            except Exception:
                logger.exception("repack (%s)", why)

    async def look_and_plan(self, why: str) -> Plan:
        """One look at all replicas and, if it pays, the moves."""
        self.moves.expire()
        self.lag.start()
        looks = await self.looks.take()
        self._review(self.looks.learn(looks))
        began = time.perf_counter()
        loads = self.looks.loads({a: look for a, look in looks.items() if look["idle"] and not self.moves.busy(a)})
        rules = self.looks.rules(looks)
        result = Plan()
        if rules is not None and self.settings.automatic and len(loads) > 1:
            result = plan(list(loads.values()), rules, self.looks.survival(loads), now=self._now())
            self._execute(result, loads, rules, looks, why, seconds=time.perf_counter() - began)
        return result

    def _execute(
        self,
        result: Plan,
        loads: dict[str, Load],
        rules: Rules,
        looks: dict[str, Look],
        why: str,
        *,
        seconds: float,
    ) -> None:
        self.plan_seconds = max(self.plan_seconds, seconds)
        self.counters["plans"] += 1
        self.counters.update({f"refused_{reason}": n for reason, n in result.refused.items()})
        number = self.counters["plans"]
        if result.releases:
            self.event(_of_plan(result, number, why, seconds))
        for release in result.releases:
            runs = {row[0]: row[1] for row in looks[release.source]["trajectories"]}
            bulks = [
                self.moves.begin(move.source, move.target, [(key, runs[key]) for key in move.keys], why, plan=number)
                for move in release.moves
            ]
            if None in bulks:
                continue
            self.reviews.add(number, release, loads, rules)
            self.event(self._of_release(release, number, loads[release.source], why))

    def _now(self) -> float:
        return time.time() * self.settings.time_scale

    # -- telling ---------------------------------------------------------------------------------------------------

    def worker_name(self, address: str) -> str:
        """What a worker is called; its address if it is gone."""
        state = self.scheduler.workers.get(address)
        return address if state is None else str(state.name)

    def event(self, event: dict[str, Any]) -> None:
        """Tell whoever watches the run."""
        self.scheduler.log_event(topic(self.settings.run), {"type": "repack", **event})

    def _of_release(self, release: Release, number: int, load: Load, why: str) -> dict[str, Any]:
        return {
            "action": "release",
            "plan": number,
            "why": why,
            "source": self.worker_name(release.source),
            "targets": ", ".join(self.worker_name(move.target) for move in release.moves),
            "trajectories": load.count,
            "version": load.version,
            "gain_expected": release.gain,
            "cost_expected": release.cost,
        }

    def _handed(self, bulk: Bulk) -> None:
        """The source has answered: if it is empty now, the feeder may give it new work."""
        self.counters["moves"] += 1
        siblings = [other for other in self.moves.bulks.values() if other.source == bulk.source]
        if all(other.emptied for other in [*siblings, bulk]):
            self.counters["freed"] += 1
            self.scheduler.log_event(freed_topic(self.settings.run), {"worker": bulk.source})

    def _over(self, bulk: Bulk) -> None:
        self.event(
            {
                "action": "move",
                "plan": bulk.plan,
                "why": bulk.why,
                "source": self.worker_name(bulk.source),
                "targets": self.worker_name(bulk.target),
                "trajectories": len(bulk.moved),
                "stayed": len(bulk.kept),
                "seconds": statistics.median(bulk.seconds) if bulk.seconds else None,
            }
        )

    def _review(self, ended: Iterable[tuple[str, int]]) -> None:
        for event in self.reviews.finished(ended):
            self.event({**event, "source": self.worker_name(event["source"])})

    def laminar_repack_status(self) -> dict[str, Any]:
        """RPC: counters since the start of the run."""
        reviews, curve = self.reviews, self.looks.curve
        return {
            "plans": self.counters["plans"],
            "moves": self.counters["moves"],
            "trajectories_moved": self.moves.count,
            "replicas_freed": self.counters["freed"],
            "releases_reviewed": reviews.done,
            "releases_not_paying": reviews.not_paying,
            "gain_expected": reviews.expected,
            "gain_measured": reviews.measured,
            "handover_ms_median": _milliseconds(self.moves.seconds),
            "placed_ms_median": _milliseconds(self.moves.placed),
            "plan_ms_max": 1000 * self.plan_seconds,
            "block_ms_max": 1000 * self.lag.longest,
            "block_own_ms_max": 1000 * self.lag.longest_own,
            "batch_bound": curve.batch_bound() if curve is not None else None,
            "refused": {name[8:]: n for name, n in self.counters.items() if name.startswith("refused_")},
        }


def freed_topic(run: str) -> str:
    """Topic on which the feeder hears of emptied replicas."""
    return f"laminar-freed-{run}"


def _of_plan(result: Plan, number: int, why: str, seconds: float) -> dict[str, Any]:
    return {
        "action": "plan",
        "plan": number,
        "why": why,
        "idle": result.idle,
        "releases": len(result.releases),
        "trajectories": sum(len(move.keys) for move in result.moves),
        "gain_expected": sum(release.gain for release in result.releases),
        "cost_expected": sum(release.cost for release in result.releases),
        "seconds": seconds,
    }


def _milliseconds(seconds: Iterable[float]) -> float | None:
    values = list(seconds)
    return 1000 * statistics.median(values) if values else None
