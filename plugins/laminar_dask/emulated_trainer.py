"""A trainer without a model: it leases groups, takes its time, publishes a version number, and commits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import get_worker

from laminar.rollout.emulation import EMULATED, EmulatedVersions, Emulation
from laminar.trainer.config import TrainerSettings
from laminar.weights.segment import segment_root
from laminar_dask.data_worker import DataWorker

__all__ = ["EmulatedTrainer"]

LESSEE = "trainer"


class EmulatedTrainer:
    """The actor; its methods are those of ``laminar_dask.trainer.Trainer``."""

    step = 0
    version = -1
    state = "new"

    def __init__(self, settings: TrainerSettings, emulation: Emulation) -> None:
        self.settings = settings
        self.emulation = emulation
        self._busy = asyncio.Lock()

    async def start(self) -> dict[str, Any]:
        """Publish the first version; a restarted one goes on with the next after the newest."""
        async with self._busy:
            if self.version < 0:
                self._data = DataWorker(get_worker())
                self._versions = EmulatedVersions(segment_root(self.settings.run))
                self.step = self._versions.step()
                await self._data.ask("laminar_release", lessee=LESSEE)
                await self._data.ask("laminar_rewind", step=self.step)
                newest = self._versions.newest()
                self._publish(0 if newest is None else newest + 1)
                self._idle_since = time.monotonic()
            return {"step": self.step, "version": self.version, "resumed": self.step > 0}

    async def train(self, groups: int, *, poll: float) -> dict[str, Any]:
        """One step, if as many complete groups can be leased within ``poll`` seconds."""
        async with self._busy:
            self.state = "waiting"
            ceiling = self.settings.staleness_ceiling
            lease = await self._data.ask(
                "laminar_lease",
                groups=groups,
                version=self.version,
                staleness_ceiling=ceiling,
                lessee=LESSEE,
                deadline=poll,
            )
            if lease["status"] != "OK":
                return {"status": "waiting", "why": lease.get("why", lease["status"])}
            began = time.monotonic()
            self.state = "training"
            await asyncio.sleep(self.emulation.train_seconds / self.emulation.time_scale)
            rows = lease["table"].select(["weight_version", "reward"]).to_pydict()
            behind = [self.version - version for version in rows["weight_version"]]
            rewards = [reward for reward in rows["reward"] if reward is not None]
            before, self.step = self.version, self.step + 1
            self._publish(before + 1)
            await self._data.ask(
                "laminar_commit", lease=lease["lease"], step=self.step, version=before, groups=lease["groups"]
            )
            wait, self._idle_since = began - self._idle_since, time.monotonic()
            return {
                "status": "trained",
                "step": self.step,
                "version": self.version,
                "rows": len(behind),
                "reward_mean": sum(rewards) / max(1, len(rewards)),
                "staleness_mean": sum(behind) / max(1, len(behind)),
                "staleness_max": max(behind, default=0),
                "wait_seconds": wait,
                "seconds": self._idle_since - began,
            }

    async def save(self, final: bool = False) -> str:
        """There is nothing to save."""
        return EMULATED

    async def status(self) -> dict[str, Any]:
        """What it does."""
        return {"state": self.state, "step": self.step, "version": self.version}

    async def close(self) -> None:
        """Nothing is held."""
        self.state = "closed"

    def _publish(self, version: int) -> None:
        self._versions.publish(version, step=self.step)
        self.version = version
