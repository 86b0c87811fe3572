"""What the scheduler knows of its replicas: asked of them at every look, and learnt from one look to the next."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Scheduler

from laminar.repack import Load, Rules
from laminar.rollout.latency import LatencyMeter, StepCurve
from laminar.rollout.lengths import Lengths, Survival
from laminar_dask._compat import workers_of
from laminar_dask.waiting import within

if TYPE_CHECKING:
    from laminar_dask.repack import RepackSettings

__all__ = ["Look", "Looks"]

logger = logging.getLogger(__name__)

Look = dict[str, Any]
"""What ``laminar_repack_look`` of a replica answers."""

LOOK_DEADLINE = 2.0
KNOWN_BATCHES = 3
"""Batch sizes whose step has to be measured before anything is planned."""


class Looks:
    """The replicas as the rules see them."""

    def __init__(self, scheduler: Scheduler, settings: RepackSettings) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.lengths = Lengths(settings.cap)
        self.curve: StepCurve | None = None

    async def take(self, *, detail: bool = False) -> dict[str, Look]:
        """Every replica that answers, by address. ``detail``: the trajectories of busy ones too."""
        addresses = workers_of(self.scheduler, "rollout")
        found = await asyncio.gather(*(self._ask(address, detail) for address in addresses))
        return {address: look for address, look in zip(addresses, found, strict=True) if look is not None}

    async def _ask(self, address: str, detail: bool) -> Look | None:
        try:
            call = self.scheduler.rpc(address).laminar_repack_look(detail=detail)
            answer: Any = await within(LOOK_DEADLINE, call)
        except (OSError, AttributeError, ValueError) as error:  # starting, or gone
            logger.debug("no look at %s: %s", address, error)
            return None
        return answer if isinstance(answer, dict) and "version" in answer else None

    def learn(self, looks: dict[str, Look]) -> list[tuple[str, int]]:
        """From how long steps took and from what has finished: the keys of these and their tokens."""
        meter = LatencyMeter()
        ended = []
        for look in looks.values():
            meter.merge(look["latency"])
            for key, group, size, tokens in look["finished"]:
                self.lengths.finished(group, tokens, group_size=size)
                ended.append((key, tokens))
        self.curve = meter.curve() if len(meter.points()) >= KNOWN_BATCHES else None
        return ended

    def rules(self, looks: dict[str, Look]) -> Rules | None:
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

    def loads(self, looks: dict[str, Look]) -> dict[str, Load]:
        """By address."""
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

    def survival(self, loads: dict[str, Load]) -> Survival:
        """The estimate of lengths, given what runs."""
        return self.lengths.survival(np.concatenate([load.generated / load.factor for load in loads.values()]))
