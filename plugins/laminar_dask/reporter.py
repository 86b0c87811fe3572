"""What the run says of itself while it goes on: events for whoever watches, metrics on disk, the summary."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distributed import Worker

from laminar.experience.store import StoreError
from laminar.flow.context import RunContext
from laminar.post_train import PostTrainSpec
from laminar.settings import Evaluation
from laminar.watch.events import Level, topic
from laminar.watch.metrics import MetricsWriter, read_metrics
from laminar.watch.summary import summarise
from laminar_dask.roles import peers
from laminar_dask.waiting import within

if TYPE_CHECKING:
    from laminar_dask.feeder import Feeder

__all__ = ["Reporter"]

LOOK_SECONDS = 1.0
FLUSH_SECONDS = 2.0
"""Age of the oldest row of metrics at which it is written: what a death of the data worker may cost."""
STATUS_DEADLINE = 2.0


class Reporter:
    """Collects and publishes; nothing in the run depends on it."""

    def __init__(self, worker: Worker, context: RunContext, spec: PostTrainSpec) -> None:
        self.worker = worker
        self.context = context
        self.spec = spec
        self.topic = topic(context.run_id)
        self.metrics = MetricsWriter(context.url, every_seconds=math.inf, every_rows=sys.maxsize)  # `run` flushes
        self.refused = ""
        self.feeder: Feeder | None = None
        self.replicas: dict[str, dict[str, Any]] = {}
        self.retired_tokens = 0
        self.last_step = (time.monotonic(), 0)
        self.evaluations: dict[str, Evaluation] = {}

    # -- events -------------------------------------------------------------------------------------------

    def message(self, text: str, *, level: Level = "info") -> None:
        """A line for the user, kept in the metrics too."""
        self.worker.log_event(self.topic, {"type": "message", "text": text, "level": level})
        self.metrics.write("events", {"level": level, "text": text})

    def step(self, report: dict[str, Any]) -> None:
        """One optimizer step is done."""
        assert self.feeder is not None
        counts = self.feeder.table.counts()
        now, tokens = time.monotonic(), self._tokens()
        since, before = self.last_step
        self.last_step = (now, tokens)
        busy = report["wait_seconds"] + report["seconds"]
        row = {
            **report,
            "tokens_per_second": max(0, tokens - before) / max(1e-9, now - since),
            "trainer_wait_fraction": report["wait_seconds"] / max(1e-9, busy),
            "versions_per_trajectory_max": self.feeder.versions_max,
            "evicted_rows": counts["evicted"],
            "equal_rewards_rows": counts.get("evicted_equal_rewards", 0),
        }
        self.metrics.write("steps", row)
        running = sum(replica.get("running", 0) for replica in self.replicas.values())
        event = {
            "type": "step",
            "steps": self.spec.steps,
            "ready": counts["ready"],
            "running": running,
            **row,
        }
        self.worker.log_event(self.topic, event)

    def evaluation(self, evaluation: Evaluation) -> None:
        """A held-out evaluation is done."""
        row = asdict(evaluation)
        self.evaluations[self.spec.evaluate_on.fingerprint()] = evaluation
        self.metrics.write("evaluations", row)
        self.worker.log_event(self.topic, {"type": "evaluation", **row})

    # -- a look around, once a second ---------------------------------------------------------------------

    async def run(self) -> None:
        """Look at the replicas and the table every second, and keep what was seen.

        A store that does not take it may come back, and gets all of it then. Whether the run can go on without one
        is for those to say who cannot.
        """
        while True:
            await self._look()
            try:
                await asyncio.to_thread(self.metrics.flush, FLUSH_SECONDS)
                self.refused = ""
            except StoreError as error:
                self._kept_back(error)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        addresses = await peers(self.worker, "rollout")
        looks = await asyncio.gather(*(self._status(address) for address in addresses))
        seen = {address: look for address, look in zip(addresses, looks, strict=True) if look is not None}
        for address in set(self.replicas) - set(addresses):
            self.retired_tokens += self.replicas.pop(address).get("tokens", 0)
        self.replicas.update(seen)
        for look in seen.values():
            self.metrics.write("replicas", look)
            self.worker.log_event(self.topic, {"type": "replica", **look})
        for row in await self._relays():
            self.metrics.write("relays", row)
        if self.feeder is not None:
            counts = self.feeder.table.counts()
            dropped = sum(self.feeder.dropped.values())
            self.worker.log_event(self.topic, {"type": "table", **counts, "dropped": dropped})

    async def _status(self, address: str) -> dict[str, Any] | None:
        try:
            status: Any = await within(STATUS_DEADLINE, self.worker.rpc(address).laminar_replica_status())
        except OSError:  # gone or busy: the scheduler notices a death, the next look shows the rest
            return None
        return dict(status)

    async def _relays(self) -> list[dict[str, Any]]:
        try:
            rows: Any = await within(STATUS_DEADLINE, self.worker.scheduler.laminar_chain_rows())
        except OSError:  # the next look is in a second
            return []
        return [dict(row) for row in rows or ()]

    def _tokens(self) -> int:
        return self.retired_tokens + sum(replica.get("tokens", 0) for replica in self.replicas.values())

    # -- the end ------------------------------------------------------------------------------------------

    async def summary(self, status: str) -> dict[str, Any]:
        """The figures of the run, from its metrics and its table."""
        assert self.feeder is not None
        await self._look()
        await asyncio.to_thread(self.metrics.flush)
        return await asyncio.to_thread(self._summary, status)

    def _summary(self, status: str) -> dict[str, Any]:
        assert self.feeder is not None
        url = self.context.url
        tables = {kind: read_metrics(url, kind) for kind in ("steps", "evaluations", "replicas")}
        numbers: dict[str, Any] = dict(
            summarise(
                tables["steps"],
                tables["evaluations"],
                tables["replicas"],
                dropped=sum(self.feeder.dropped.values()),
                versions_per_trajectory_max=self.feeder.versions_max or None,  # before a restart: as the steps say
            )
        )
        return {
            "status": status,
            **numbers,
            "dropped_by_reason": dict(self.feeder.dropped),
            "table": self.feeder.table.counts(),
        }

    async def close(self) -> None:
        """Write what is left. A store that does not take it is no reason of its own why a run ends."""
        try:
            await asyncio.to_thread(self.metrics.close)
        except StoreError as error:
            self._kept_back(error)

    def _kept_back(self, error: StoreError) -> None:
        """Say so, once."""
        if not self.refused:
            self.refused = str(error)
            self.message(f"metrics are kept back, the store does not take them: {error}", level="warning")
