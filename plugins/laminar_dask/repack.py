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
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Scheduler, SchedulerPlugin

from laminar.repack import Load, Plan, Release, Rules, plan
from laminar.rollout.latency import LatencyMeter, StepCurve
from laminar.rollout.lengths import Lengths, Survival
from laminar.watch.events import topic
from laminar_dask._compat import workers_of
from laminar_dask.drain import TRAJECTORIES, ByHand
from laminar_dask.moves import Bulk, Moves
from laminar_dask.reviews import Reviews

__all__ = ["RepackPlugin", "RepackSettings", "freed_topic"]

logger = logging.getLogger(__name__)

LOOK_DEADLINE = 2.0
SHORTEST_PERIOD = 0.1
"""Seconds between two looks at least, whatever the time scale."""
KNOWN_BATCHES = 3
"""Batch sizes whose step has to be measured before anything is planned."""


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


def freed_topic(run: str) -> str:
    """Topic on which the feeder hears of emptied replicas."""
    return f"laminar-freed-{run}"


class RepackPlugin(SchedulerPlugin):
    """The scheduler half."""

    name = "laminar-repack"

    def __init__(self, settings: RepackSettings) -> None:
        self.settings = settings

    async def start(self, scheduler: Scheduler) -> None:
        """Answer calls, and begin to look."""
        self.scheduler = scheduler
        self.moves = Moves(scheduler, on_handed=self._handed, on_over=self._over)
        self.lengths = Lengths(self.settings.cap)
        self.reviews = Reviews()
        self.counters: Counter[str] = Counter()
        self.plan_seconds: list[float] = []
        self.longest_block = 0.0
        self.curve: StepCurve | None = None
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

    def _on_handed(self, move: str, moved: list[str], kept: list[tuple[str, str]], worker: str) -> None:
        try:  # an error in a stream handler would cost the worker its connection
            self.moves.handed(move, moved, kept)
        except Exception:
            logger.exception("hand-over %s", move)

    def _on_resumed(self, key: str, at: float, worker: str) -> None:
        try:
            self.moves.resumed(key, at)
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
                await asyncio.wait_for(self.trigger.wait(), period)
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
        looks = await self.looks()
        began = time.perf_counter()
        self._learn(looks)
        loads = self.loads({a: look for a, look in looks.items() if look["idle"] and not self.moves.busy(a)})
        rules = self.rules(looks)
        result = Plan()
        if rules is not None and self.settings.automatic and len(loads) > 1:
            result = plan(list(loads.values()), rules, self._survival(loads), now=self._now())
            self.plan_seconds = [*self.plan_seconds[-1000:], time.perf_counter() - began]
            self._execute(result, loads, rules, looks, why)
        self.longest_block = max(self.longest_block, time.perf_counter() - began)
        return result

    def _execute(
        self, result: Plan, loads: dict[str, Load], rules: Rules, looks: dict[str, dict[str, Any]], why: str
    ) -> None:
        self.counters["plans"] += 1
        self.counters.update({f"refused_{reason}": n for reason, n in result.refused.items()})
        for release in result.releases:
            runs = {row[0]: row[1] for row in looks[release.source]["trajectories"]}
            bulks = [
                self.moves.begin(move.source, move.target, [(key, runs[key]) for key in move.keys], why)
                for move in release.moves
            ]
            if None in bulks:
                continue
            self.reviews.add(release, loads, rules)
            self.event(self._told(release, result, loads, why))

    def _told(self, release: Release, result: Plan, loads: dict[str, Load], why: str) -> dict[str, Any]:
        return {
            "action": "release",
            "why": why,
            "source": self.worker_name(release.source),
            "targets": ", ".join(self.worker_name(move.target) for move in release.moves),
            "trajectories": loads[release.source].count,
            "version": loads[release.source].version,
            "idle": result.idle,
            "gain_expected": release.gain,
            "cost_expected": release.cost,
        }

    # -- looking ---------------------------------------------------------------------------------------------------

    async def looks(self, *, detail: bool = False) -> dict[str, dict[str, Any]]:
        """Every replica that answers, by address."""
        addresses = workers_of(self.scheduler, "rollout")
        found = await asyncio.gather(*(self._look(address, detail) for address in addresses))
        return {address: look for address, look in zip(addresses, found, strict=True) if look is not None}

    async def _look(self, address: str, detail: bool) -> dict[str, Any] | None:
        try:
            call = self.scheduler.rpc(address).laminar_repack_look(detail=detail)
            answer: Any = await asyncio.wait_for(call, LOOK_DEADLINE)
        except (OSError, AttributeError, ValueError) as error:  # starting, or gone
            logger.debug("no look at %s: %s", address, error)
            return None
        return answer if isinstance(answer, dict) and "version" in answer else None

    def _learn(self, looks: dict[str, dict[str, Any]]) -> None:
        """From what has finished since the last look, and how long steps took."""
        meter = LatencyMeter()
        ended = []
        for look in looks.values():
            meter.merge(look["latency"])
            for key, group, size, tokens in look["finished"]:
                self.lengths.finished(group, tokens, group_size=size)
                ended.append((key, tokens))
        self.curve = meter.curve() if len(meter.points()) >= KNOWN_BATCHES else None
        for event in self.reviews.finished(ended):
            self.event({**event, "source": self.worker_name(event["source"])})

    def rules(self, looks: dict[str, dict[str, Any]]) -> Rules | None:
        """None until enough was measured."""
        if self.curve is None:
            return None
        settings = self.settings
        rates = [look["prefill_rate"] for look in looks.values() if look["prefill_rate"]]
        return Rules(
            self.curve,
            settings.cap,
            batch_bound=min(settings.slots, self.curve.batch_bound()),
            prefill_rate=min(rates, default=0.0),
            margin=settings.margin,
            pause=settings.pause,
            overhead=settings.overhead,
        )

    def loads(self, looks: dict[str, dict[str, Any]]) -> dict[str, Load]:
        """The replicas as the rules see them."""
        loads = {}
        for address, look in looks.items():
            rows = look["trajectories"]
            keys, _, groups, sizes, prompts, tokens, moved = zip(*rows, strict=True) if rows else ((),) * 7
            generated = np.array(tokens, dtype=np.float64)
            loads[address] = Load(
                name=address,
                version=look["version"],
                kv_total=look["kv_total"],
                idle=look["idle"],
                waiting=look["waiting"],
                keys=tuple(keys),
                kv=generated + np.array(prompts, dtype=np.float64),
                generated=generated,
                moved_at=np.array(moved, dtype=np.float64),
                factor=self.lengths.factors(groups, sizes),
            )
        return loads

    def _survival(self, loads: dict[str, Load]) -> Survival:
        return self.lengths.survival(np.concatenate([load.generated / load.factor for load in loads.values()]))

    def _now(self) -> float:
        return time.time() * self.settings.time_scale

    def worker_name(self, address: str) -> str:
        """What a worker is called; its address if it is gone."""
        state = self.scheduler.workers.get(address)
        return address if state is None else str(state.name)

    # -- telling ---------------------------------------------------------------------------------------------------

    def _handed(self, bulk: Bulk) -> None:
        """The source has answered: if it is empty now, the feeder may give it new work."""
        self.counters["moves"] += 1
        siblings = [other for other in self.moves.bulks.values() if other.source == bulk.source]
        if all(other.emptied for other in [*siblings, bulk]):
            self.counters["freed"] += 1
            self.scheduler.log_event(freed_topic(self.settings.run), {"worker": bulk.source})

    def _over(self, bulk: Bulk) -> None:
        seconds = statistics.median(bulk.seconds) if bulk.seconds else None
        self.event(
            {
                "action": "move",
                "why": bulk.why,
                "source": self.worker_name(bulk.source),
                "targets": self.worker_name(bulk.target),
                "trajectories": len(bulk.moved),
                "stayed": len(bulk.kept),
                "seconds": seconds,
            }
        )

    def event(self, event: dict[str, Any]) -> None:
        """Tell whoever watches the run."""
        self.scheduler.log_event(topic(self.settings.run), {"type": "repack", **event})

    def laminar_repack_status(self) -> dict[str, Any]:
        """RPC: counters since the start of the run."""
        reviews, seconds = self.reviews, self.moves.seconds
        return {
            "plans": self.counters["plans"],
            "moves": self.counters["moves"],
            "trajectories_moved": self.moves.count,
            "replicas_freed": self.counters["freed"],
            "releases_reviewed": reviews.done,
            "releases_not_paying": reviews.not_paying,
            "gain_expected": reviews.expected,
            "gain_measured": reviews.measured,
            "handover_ms_median": 1000 * statistics.median(seconds) if seconds else None,
            "plan_ms_max": 1000 * max(self.plan_seconds, default=0.0),
            "block_ms_max": 1000 * self.longest_block,
            "batch_bound": self.curve.batch_bound() if self.curve is not None else None,
            "refused": {name[8:]: n for name, n in self.counters.items() if name.startswith("refused_")},
        }
