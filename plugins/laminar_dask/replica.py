"""Steps 1, 2, 3 and 7 on a rollout worker: one engine, many trajectory tasks, weights from the host's relay.

``trajectory`` is the Dask task: one a trajectory, under a stable key. The plugin owns the engine; tasks only
await it. When nothing runs, the replica takes the newest weights before it lets the next trajectory in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from dataclasses import dataclass
from typing import Any

from distributed import Reschedule, Worker, WorkerPlugin, get_worker

from laminar.errors import RunFailed
from laminar.repack import NEVER
from laminar.rollout.emulation import EMULATED, Emulation
from laminar.rollout.engine import Engine, Generated
from laminar.rollout.engines import create_engine
from laminar.rollout.engines.emulated import EmulatedEngine
from laminar.rollout.gate import Want
from laminar.rollout.rows import Story, row_of
from laminar.rollout.tokens import decode, load_tokenizer
from laminar.trajectory import Score, TrajectoryRequest
from laminar_dask._compat import add_metric, has_role, is_cancelled, remove_metric, run_id_of
from laminar_dask.arrivals import Arrival
from laminar_dask.attempts import Attempt, HandedOver
from laminar_dask.collector import calm_collector
from laminar_dask.environment import environment_plugin_name
from laminar_dask.handover import Handover
from laminar_dask.in_engine import InEngine
from laminar_dask.outbox import Outbox
from laminar_dask.serving import Cancelled, Leaving, Serving, VersionGone
from laminar_dask.versions import EmulatedSource, RelaySource
from laminar_dask.waiting import within

__all__ = ["ReplicaPlugin", "ReplicaSettings", "trajectory"]

logger = logging.getLogger(__name__)

START_DEADLINE = 180.0


@dataclass(frozen=True)
class ReplicaSettings:
    """How a replica builds its engine; see ``laminar.Rollouts`` for the fields."""

    run: str
    model: str
    engine: str
    kv_tokens: int
    slots: int
    threads: int
    seed: int
    trajectory_deadline: float
    dtype: str = "float32"
    emulation: Emulation | None = None

    @property
    def emulated(self) -> bool:
        """Whether there is no model."""
        return self.engine == EMULATED


async def trajectory(request: TrajectoryRequest) -> dict[str, Any]:
    """The Dask task: generate, score and store one trajectory.

    Returns a small summary (id, reward, tokens, version …); the row itself goes to the experience table. Raises
    ``Reschedule`` when it goes on elsewhere: its state is there already.
    """
    plugin: ReplicaPlugin = get_worker().plugins[ReplicaPlugin.name]
    while True:
        try:
            summary = await plugin.run(request)
            break
        except Cancelled:
            if is_cancelled(plugin.worker, request.key):
                raise  # else it was asked for again meanwhile, and Dask takes this attempt for the new one
    if summary is None:  # raised here and not where it was decided: Dask pickles the traceback, frame by frame
        raise Reschedule
    return summary


class ReplicaPlugin(WorkerPlugin):
    """The replica: engine, gate, and the way to the data worker."""

    name = "laminar-replica"

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings

    def setup(self, worker: Worker) -> None:
        """Begin to build the engine, in the background: the worker registers meanwhile."""
        self.active = has_role(worker, "rollout")
        if not self.active:
            return
        self.worker = worker
        self.outbox = Outbox(worker)
        self.attempts: dict[str, Attempt] = {}
        self.count = sum if self.settings.emulated else len  # an emulated id stands for many tokens
        time_scale = self.settings.emulation.time_scale if self.settings.emulation else 1.0
        self.inside = InEngine(worker, self.outbox, self.attempts, count=self.count, time_scale=time_scale)
        self.handover = Handover(worker, self.outbox, self.attempts, self.inside)
        self.finished = 0
        self.began = time.monotonic()
        self.serving: Serving | None = None
        self.ready = asyncio.create_task(self._start())
        self.stream = asyncio.create_task(self.inside.stream())
        add_metric(worker, "laminar_replica", lambda worker: self.status())
        worker.handlers["laminar_replica_status"] = self.status

    async def teardown(self, worker: Worker) -> None:
        """Stop the engine's thread, and say no more of a replica that is none."""
        if not self.active:
            return
        remove_metric(worker, "laminar_replica")
        self.stream.cancel()
        self.ready.cancel()
        if self.serving is not None:
            await self.serving.close()

    async def _start(self) -> None:
        settings = self.settings

        def build() -> tuple[Engine, Any]:
            options: dict[str, Any] = (
                {"emulation": settings.emulation} if settings.emulated else {"dtype": settings.dtype}
            )
            if not settings.emulated:
                import torch

                torch.set_num_threads(settings.threads)
            engine = create_engine(
                settings.engine,
                settings.model,
                kv_tokens=settings.kv_tokens,
                seed=self._seed(),
                threads=settings.threads,
                max_running=settings.slots,
                **options,
            )
            engine.start()
            return engine, load_tokenizer(settings.model)

        engine, self.tokenizer = await asyncio.to_thread(build)
        calm_collector()
        source = EmulatedSource(settings.run) if settings.emulated else RelaySource(settings.run)
        self.serving = self.inside.serving = Serving(engine, source)
        if isinstance(engine, EmulatedEngine):
            self.handover.prefill_rate = engine.batch.stall_rate

    def _seed(self) -> int:
        """Each process its own stream: two replicas, or one before and after a restart, never draw the same."""
        return zlib.crc32(f"{self.settings.seed} {self.worker.name} {self.worker.address}".encode())

    async def _engine_ready(self) -> Serving:
        try:
            await within(START_DEADLINE, asyncio.shield(self.ready))
        except TimeoutError as error:
            raise RunFailed(f"the engine of {self.worker.name} was not up after {START_DEADLINE:.0f} s") from error
        except Exception as error:
            raise RunFailed(f"the engine of {self.worker.name} did not start: {error}") from error
        assert self.serving is not None
        return self.serving

    # -- one trajectory -----------------------------------------------------------------------------------

    async def run(self, request: TrajectoryRequest) -> dict[str, Any] | None:
        """Resume or begin a trajectory, score it, and return once its row is durable; None if it was handed over."""
        story = Story(replica=str(self.worker.name), run_id=run_id_of(self.worker, request.key))
        arrival = self.handover.arrivals.take(request.key, story.run_id)
        attempt = (arrival and arrival.attempt) or Attempt(request)
        self.attempts[request.key] = attempt
        try:
            serving = await self._engine_ready()
            generated, versions = await self._generate(serving, attempt, arrival, story)
            attempt.phase = "scoring"
            tokens = self.count(generated.ids)
            self.handover.finished.append((request.key, request.group, request.group_size, tokens))
            text = decode(self.tokenizer, generated.ids)
            score = await self._score(request, generated, text, attempt.cancelled)
            row = row_of(request, generated, score, story, text=text)
            if request.purpose == "train":
                await self.outbox.append(row)
        except HandedOver:
            return None
        finally:
            self.attempts.pop(request.key, None)
            if attempt.departure is not None:
                attempt.departure.ended(request.key)
        self.finished += 1
        return {
            "id": request.id,
            "reward": score.reward,
            "tokens": tokens,
            "version": story.weight_version,
            "versions": versions,
            "migrations": story.migrations,
            "finish_reason": generated.finish_reason,
            "drop_reason": row["drop_reason"],
            "message": row["message"],
        }

    async def _generate(
        self, serving: Serving, attempt: Attempt, arrival: Arrival | None, story: Story
    ) -> tuple[Generated, int]:
        request = attempt.request
        if arrival is not None:
            partial = arrival.partial
            attempt.migrations, attempt.moved_at = arrival.state["migrations"], self.handover.arrivals.now()
        else:
            self.handover.filled += 1
            partial = await self.outbox.resume((request.id, story.run_id)) if request.purpose == "train" else None
            attempt.migrations = 1 if partial else 0
        while True:
            want = Want(at_least=request.at_least, exactly=partial["version"] if partial else None)
            try:
                if attempt.generating is None:
                    attempt.version = await serving.enter(want, attempt.cancelled, attempt.moving)
            except VersionGone:
                # Its weights are held nowhere any more: begin anew, so that one version generates all of it.
                partial, attempt.migrations = None, 0
                continue
            except Leaving:
                partial = await self._leave(attempt, partial, None)
                continue
            generated = await self._in_engine(serving, attempt, story, partial)
            if attempt.departure is None:
                if generated.finish_reason == "abort":
                    raise HandedOver  # the engine was closed under it: whoever gets it next resumes it
                break
            if generated.finish_reason != "abort":
                attempt.departure.ended(request.key)
                break
            partial = await self._leave(attempt, partial, generated)
        story.weight_version, story.migrations = attempt.version, attempt.migrations
        story.finish_version = serving.newest() or attempt.version
        return generated, len({attempt.version, serving.engine.version})

    async def _leave(
        self, attempt: Attempt, partial: dict[str, Any] | None, generated: Generated | None
    ) -> dict[str, Any] | None:
        """Hand the trajectory over, or get back what to go on with here where that failed."""
        assert attempt.departure is not None
        state = self.handover.departures.state_of(attempt, partial, generated)
        if await attempt.departure.leave(attempt.request.key, state):
            raise HandedOver
        attempt.departure = None
        attempt.moving.clear()
        return state if state["ids"] else None

    async def _in_engine(
        self, serving: Serving, attempt: Attempt, story: Story, partial: dict[str, Any] | None
    ) -> Generated:
        request = attempt.request
        story.started_at = story.started_at or time.time()
        try:
            if attempt.generating is None:
                await self.inside.until_out(request.id)
                self.inside.begin(serving, attempt, partial)
            assert attempt.generating is not None
            if attempt.moved_at != NEVER:
                self.handover.arrived(request.key)
            if attempt.moving.is_set():  # asked between the gate and the engine
                asyncio.get_running_loop().call_soon(serving.engine.abort, request.id)
            generated = await serving.finish(
                request.id,
                attempt.generating,
                cancelled=attempt.cancelled,
                deadline=self.settings.trajectory_deadline,
            )
            self._leave_if_dead(serving)
            self.inside.tokens += self.count(generated.ids) - attempt.tokens
            return generated
        finally:
            self.inside.out(attempt)

    def _leave_if_dead(self, serving: Serving) -> None:
        """An engine whose thread died serves nobody: end the process, its nanny starts a fresh one and the
        trajectories resume from the partial pool."""
        if not serving.alive():
            self.worker.log_event("laminar", {"action": "engine-died", "worker": str(self.worker.name)})
            logger.error("the engine of %s died; the worker restarts", self.worker.name)
            os._exit(70)

    async def _score(
        self, request: TrajectoryRequest, generated: Generated, text: str, cancelled: asyncio.Event
    ) -> Score:
        if generated.finish_reason in ("error", "abort"):
            return Score(reward=None, status="error", message=generated.message)
        plugin = self.worker.plugins[environment_plugin_name(request.environment)]
        scoring = asyncio.ensure_future(plugin.score(request.prompt, text))
        gone = asyncio.ensure_future(cancelled.wait())
        await asyncio.wait({scoring, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not scoring.done():
            scoring.cancel()
            raise Cancelled(f"trajectory {request.id} was cancelled while its reward was computed")
        return scoring.result()

    # -- what goes on beside ------------------------------------------------------------------------------

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Dask does not stop a coroutine whose result nobody wants: tell it."""
        attempt = self.attempts.get(key) if self.active else None
        if attempt is not None and is_cancelled(self.worker, key):
            attempt.cancelled.set()

    def status(self) -> dict[str, Any]:
        """Gauges for the conductor, the dashboard and the terminal."""
        if self.serving is None:
            return {"name": str(self.worker.name), "state": "starting", "tokens": 0, "busy": 0.0, "up": 0.0}
        gauges = self.serving.engine.gauges()
        return {
            "name": str(self.worker.name),
            "state": self.serving.state,
            "version": self.serving.engine.version,
            "running": gauges.running,
            "waiting": gauges.waiting + self.serving.waiting,
            "kv_used": gauges.kv_used,
            "kv_total": gauges.kv_total,
            "tokens": self.inside.tokens,
            "finished": self.finished,
            "busy": self.serving.busy_seconds(),
            "up": time.monotonic() - self.began,
        }
