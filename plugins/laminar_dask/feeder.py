"""Step 1: hands whole groups to replicas that have nothing left to do, one loop a replica.

A replica's loop submits a feed of trajectories, waits until all of them are done (wherever they finished) and asks
for more; the replica takes the newest weights in between. No loop waits for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributed import Future, wait
from distributed.client import FuturesCancelledError

from laminar.errors import RunFailed
from laminar.experience.prompt_pool import Draw, PromptPool, Source, remember
from laminar.experience.schema import record_batch
from laminar.rollout.engine import Generated
from laminar.rollout.lengths import PromptLengths
from laminar.rollout.rows import Story, row_of
from laminar.rollout.tokens import encode, load_tokenizer
from laminar.schedules import backlog_limit, groups_to_admit, lowest_version
from laminar.trajectory import Sampling, Score, TrajectoryRequest
from laminar_dask.evaluation import EvaluationJob
from laminar_dask.roles import peers
from laminar_dask.trajectories import cancel, submit
from laminar_dask.waiting import end

if TYPE_CHECKING:
    from laminar_dask.conductor import Conductor

__all__ = ["Feeder"]

NO_REPLICA_DEADLINE = 180.0
"""Seconds without any rollout worker after which the run fails."""
LOOK_SECONDS = 0.5
IDLE_SECONDS = 0.02
GIVE_UP_BATCHES = 3
"""Batches of trajectories dropped in a row, none scored, after which the run fails with the last reason."""


class Feeder:
    """Admission, placement and bookkeeping of trajectories."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self.spec = conductor.spec
        self.table = conductor.table
        self.environment = self.spec.environment
        self.tokenizer = load_tokenizer(conductor.model)
        rollouts = self.spec.rollouts
        self.sampling = Sampling(temperature=rollouts.temperature, max_new_tokens=rollouts.max_new_tokens)
        sources = Source.of(self.environment, self.spec.prompt_priority)
        self.prompts = PromptPool(sources, self.spec.seed, epochs=self.spec.epochs)
        self.limit = backlog_limit(batch_size=self.spec.batch_size, staleness_ceiling=self.spec.staleness_ceiling)
        self.evaluations: deque[tuple[EvaluationJob, list[TrajectoryRequest]]] = deque()
        self.unfinished: deque[list[TrajectoryRequest]] = deque()
        self.loops: dict[str, asyncio.Task[None]] = {}
        self.batches: set[asyncio.Task[None]] = set()
        self.freed: dict[str, asyncio.Event] = {}
        self.futures: dict[str, Future] = {}
        self.lengths = PromptLengths()
        self.feeding = 0
        self.admitted = self.settled = self.stored = 0
        self.admitting = True
        self.dropped: Counter[str] = Counter()
        self.dropped_in_a_row = 0
        self.versions_max = 0
        self.last_finished = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether any replica still works on what it was given."""
        return self.feeding > 0

    @property
    def exhausted(self) -> bool:
        """Whether every prompt that was to be drawn was, and all that came of them has arrived."""
        return self.prompts.exhausted and not self.unfinished and not self.busy

    @property
    def outstanding(self) -> int:
        """Trajectories under way: running, ready or leased."""
        return self.admitted - self.settled

    # -- what is to be done -------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Take up what an earlier conductor of this run had begun: samples that are missing go first.

        Raises
        ------
        UserError
            The run began with other data.
        """
        await asyncio.to_thread(remember, self.conductor.context.url, self.prompts)
        stored = self.table.trajectory_ids()
        counts = self.table.counts()
        self.prompts.consume(Draw.number(group) for group in self.table.groups_settled())
        end = 1 + max((Draw.number(group) for group in self.table.groups_seen()), default=-1)
        for draw in self.prompts.take(end, before=end):
            missing = [request for request in self._group(draw) if request.id not in stored]
            if missing:
                self.unfinished.append(missing)
        self.settled = counts["trained"] + counts["evicted"]
        self.admitted = self.settled + counts["ready"] + counts["leased"]

    def settle(self) -> None:
        """Count what was trained or evicted since; called between two steps, when the version is known."""
        counts = self.table.counts()
        self.settled = counts["trained"] + counts["evicted"]
        stored = self.settled + counts["ready"] + counts["leased"]
        if stored != self.stored:
            self.stored, self.last_finished = stored, time.monotonic()

    def evaluate(self, job: EvaluationJob) -> None:
        """Queue an evaluation in pieces that fit a replica."""
        size = max(1, min(self.spec.rollouts.slots, -(-len(job.requests) // self.spec.rollouts.replicas)))
        for start in range(0, len(job.requests), size):
            self.evaluations.append((job, job.requests[start : start + size]))

    def close_admission(self) -> None:
        """From now on only evaluations are handed out."""
        self.admitting = False

    def _group(self, draw: Draw) -> list[TrajectoryRequest]:
        """The requests of one drawn prompt; empty if the model cannot take it (dropped and counted)."""
        prompt = self.environment.prompt(draw.index)
        prompt_ids = encode(self.tokenizer, prompt)
        if len(prompt_ids) > self.spec.prompt_room():
            self.dropped["prompt_too_long"] += 1
            return []
        size = self.spec.algorithm.group_size
        return [
            TrajectoryRequest(
                run=self.conductor.context.run_id,
                group=draw.group_id,
                sample=sample,
                group_size=size,
                prompt=prompt,
                prompt_ids=prompt_ids,
                sampling=self.sampling,
                environment=self.environment.fingerprint(),
            )
            for sample in range(size)
        ]

    def _next_groups(self) -> list[TrajectoryRequest]:
        if not self.admitting or self.conductor.stopping:
            return []
        size = self.spec.algorithm.group_size
        count = groups_to_admit(
            self.outstanding,
            limit=self.limit,
            batch_size=self.spec.batch_size,
            group_size=size,
            feed=self.spec.feed,
        )
        at_least = lowest_version(self.conductor.version, staleness_ceiling=self.spec.staleness_ceiling)
        requests: list[TrajectoryRequest] = []
        attempts = 0
        while len(requests) < count * size and attempts < 100 * count:
            attempts += 1
            if self.unfinished:
                requests += self.unfinished.popleft()
            else:
                requests += [request for draw in self.prompts.take(1) for request in self._group(draw)]
        self.admitted += len(requests)
        requests.sort(key=lambda request: -self.lengths.expected(request.prompt.id))
        now = time.time()
        return [replace(request, at_least=at_least, queued_at=now) for request in requests]

    # -- one loop a replica -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep one loop for each rollout worker, those that join later included."""
        seen = time.monotonic()
        try:
            while True:
                addresses = await peers(self.conductor.worker, "rollout")
                if addresses:
                    seen = time.monotonic()
                elif time.monotonic() - seen > NO_REPLICA_DEADLINE:
                    raise RunFailed(
                        f"no rollout worker for {NO_REPLICA_DEADLINE:.0f} s; expected {self.spec.rollouts.replicas}: "
                        "all of them died and none came back"
                    )
                for address in set(addresses) - set(self.loops):
                    self.loops[address] = asyncio.create_task(self._feed(address))
                for batch in [batch for batch in self.batches if batch.done()]:
                    self.batches.discard(batch)
                    batch.result()
                for address, loop in list(self.loops.items()):
                    if loop.done():
                        del self.loops[address]
                        loop.result()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await end([*self.loops.values(), *self.batches])
            self.loops.clear()
            self.batches.clear()

    async def _feed(self, address: str) -> None:
        while address in await peers(self.conductor.worker, "rollout"):
            if self.evaluations:
                job, requests = self.evaluations.popleft()
                await self._hand_out(requests, address, job)
            elif requests := self._next_groups():
                await self._hand_out(requests, address, None)
            else:
                await asyncio.sleep(IDLE_SECONDS)

    def on_freed(self, event: tuple[float, dict[str, Any]]) -> None:
        """A replica was emptied by repack: it may have new work, while its old one goes on elsewhere."""
        self.freed.setdefault(event[1]["worker"], asyncio.Event()).set()

    async def _hand_out(self, requests: list[TrajectoryRequest], address: str, job: EvaluationJob | None) -> None:
        """Until the replica has nothing left to do: all is done, or what was left went elsewhere."""
        freed = self.freed.setdefault(address, asyncio.Event())
        freed.clear()
        batch = asyncio.create_task(self._run_batch(requests, address, job))
        self.batches.add(batch)
        emptied = asyncio.ensure_future(freed.wait())
        await asyncio.wait({batch, emptied}, return_when=asyncio.FIRST_COMPLETED)
        emptied.cancel()

    async def _run_batch(self, requests: list[TrajectoryRequest], address: str, job: EvaluationJob | None) -> None:
        """Submit a feed to a replica and see it through; Dask restarts what a dead worker leaves behind."""
        futures = submit(self.conductor.client, requests, near=address)
        self.futures.update({future.key: future for future in futures})
        self.feeding += 1
        try:
            results = await self._results(futures)
            for request, future in zip(requests, futures, strict=True):
                await self._see(request, future, results.get(request.key), job)
        finally:
            self.feeding -= 1
            for future in futures:
                self.futures.pop(future.key, None)

    async def _results(self, futures: list[Future]) -> dict[str, Any]:
        """Summaries by key, when all are done. One whose worker died with it is computed again by Dask."""
        results: dict[str, Any] = {}
        while True:
            with contextlib.suppress(FuturesCancelledError):
                await wait(futures)
            missing = {f.key: f for f in futures if f.key not in results and f.status not in ("error", "cancelled")}
            if not missing:
                return results
            results |= await self.conductor.client.gather(missing, errors="skip", direct=True)
            await asyncio.sleep(IDLE_SECONDS)

    async def _see(self, request: TrajectoryRequest, future: Future, result: Any, job: EvaluationJob | None) -> None:
        if result is None and future.status == "error":
            error = await future.exception()
            if isinstance(error, RunFailed):
                raise error
            result = await self._failed(request, str(error))
        if result is None:
            return  # cancelled
        if job is not None:
            job.add(request, result)
            return
        self.versions_max = max(self.versions_max, result["versions"])
        self.lengths.add(request.prompt.id, result["tokens"])
        self._count_drop(request, result)

    async def _failed(self, request: TrajectoryRequest, message: str) -> dict[str, Any]:
        """A trajectory that raised still counts for its group: a row says why, and the group can complete."""
        generated = Generated(request.id, (), (), "error", message=message.splitlines()[0] if message else "")
        row = row_of(request, generated, Score(reward=None, status="error"), Story(), text="")
        if request.purpose == "train":
            await self.conductor.table_plugin.laminar_append(record_batch([row]))
        return {
            "reward": None,
            "tokens": 0,
            "versions": 0,
            "drop_reason": row["drop_reason"],
            "message": message,
        }

    def _count_drop(self, request: TrajectoryRequest, result: dict[str, Any]) -> None:
        reason = result["drop_reason"]
        if reason is None:
            self.dropped_in_a_row = 0
            return
        self.dropped[reason] += 1
        self.dropped_in_a_row += 1
        if self.dropped[reason] == 1:
            self.conductor.reporter.message(
                f"trajectory {request.id} was dropped ({reason}): {result['message']}", level="warning"
            )
        if self.dropped_in_a_row >= GIVE_UP_BATCHES * self.spec.batch_size:
            raise RunFailed(
                f"the last {self.dropped_in_a_row} trajectories were all dropped, the last one for {reason}: "
                f"{result['message']}"
            )

    async def cancel(self) -> None:
        """Nobody needs what still runs: engines abort it, scorers are killed."""
        futures = list(self.futures.values())
        self.futures.clear()
        await cancel(self.conductor.client, futures)
