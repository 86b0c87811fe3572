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

from distributed import Worker, WorkerPlugin, get_worker

from laminar.errors import LaminarError, RunFailed
from laminar.rollout.engine import Engine, Generated, Generation
from laminar.rollout.engines import create_engine
from laminar.rollout.gate import Want
from laminar.rollout.rows import Story, row_of
from laminar.rollout.tokens import decode, load_tokenizer
from laminar.trajectory import Score, TrajectoryRequest, Version
from laminar_dask._compat import has_role, is_cancelled, run_id_of
from laminar_dask.environment import environment_plugin_name
from laminar_dask.outbox import Outbox
from laminar_dask.serving import Serving, VersionGone

__all__ = ["ReplicaPlugin", "ReplicaSettings", "trajectory"]

logger = logging.getLogger(__name__)

STREAM_SECONDS = 0.25
"""How often new tokens of all running trajectories go to the partial pool."""
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


async def trajectory(request: TrajectoryRequest) -> dict[str, Any]:
    """The Dask task: generate, score and store one trajectory.

    Returns a small summary (id, reward, tokens, version …); the row itself goes to the experience table.
    """
    plugin: ReplicaPlugin = get_worker().plugins[ReplicaPlugin.name]
    return await plugin.run(request)


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
        self.attempts: dict[str, asyncio.Event] = {}
        self.running: dict[str, tuple[str, Version]] = {}
        self.tokens = 0
        self.finished = 0
        self.began = time.monotonic()
        self.serving: Serving | None = None
        self.ready = asyncio.create_task(self._start())
        self.stream = asyncio.create_task(self._stream())
        worker.metrics["laminar_replica"] = lambda w: self.status()
        worker.handlers["laminar_replica_status"] = self.status

    async def teardown(self, worker: Worker) -> None:
        """Stop the engine's thread."""
        if not self.active:
            return
        self.stream.cancel()
        self.ready.cancel()
        if self.serving is not None:
            await self.serving.close()

    async def _start(self) -> None:
        def build() -> tuple[Engine, Any]:
            import torch

            torch.set_num_threads(self.settings.threads)
            engine = create_engine(
                self.settings.engine,
                self.settings.model,
                kv_tokens=self.settings.kv_tokens,
                seed=self._seed(),
                threads=self.settings.threads,
                max_running=self.settings.slots,
            )
            engine.start()
            return engine, load_tokenizer(self.settings.model)

        engine, self.tokenizer = await asyncio.to_thread(build)
        self.serving = Serving(engine, run=self.settings.run)

    def _seed(self) -> int:
        """Each process its own stream: two replicas, or one before and after a restart, never draw the same."""
        return zlib.crc32(f"{self.settings.seed} {self.worker.name} {self.worker.address}".encode())

    async def _engine_ready(self) -> Serving:
        try:
            await asyncio.wait_for(asyncio.shield(self.ready), START_DEADLINE)
        except TimeoutError as error:
            raise RunFailed(f"the engine of {self.worker.name} was not up after {START_DEADLINE:.0f} s") from error
        except Exception as error:
            raise RunFailed(f"the engine of {self.worker.name} did not start: {error}") from error
        assert self.serving is not None
        return self.serving

    # -- one trajectory -----------------------------------------------------------------------------------

    async def run(self, request: TrajectoryRequest) -> dict[str, Any]:
        """Resume or begin a trajectory, score it, and return once its row is durable."""
        cancelled = self.attempts[request.key] = asyncio.Event()
        story = Story(replica=str(self.worker.name), run_id=run_id_of(self.worker, request.key))
        try:
            serving = await self._engine_ready()
            generated, versions = await self._generate(serving, request, story, cancelled)
            text = decode(self.tokenizer, generated.ids)
            score = await self._score(request, generated, text, cancelled)
            row = row_of(request, generated, score, story, text=text)
            if request.purpose == "train":
                await self.outbox.append(row)
        finally:
            self.attempts.pop(request.key, None)
        self.finished += 1
        return {
            "id": request.id,
            "reward": score.reward,
            "tokens": len(generated.ids),
            "version": story.weight_version,
            "versions": versions,
            "finish_reason": generated.finish_reason,
            "drop_reason": row["drop_reason"],
            "message": row["message"],
        }

    async def _generate(
        self, serving: Serving, request: TrajectoryRequest, story: Story, cancelled: asyncio.Event
    ) -> tuple[Generated, int]:
        partial = None
        if request.purpose == "train":
            partial = await self.outbox.resume((request.id, story.run_id))
        story.migrations = 1 if partial else 0
        want = Want(at_least=request.at_least, exactly=partial["version"] if partial else None)
        try:
            version = await serving.enter(want, cancelled)
        except VersionGone:
            # Its weights are held nowhere any more: begin anew, so that one version generates all of it.
            partial, story.migrations = None, 0
            version = await serving.enter(Want(at_least=request.at_least), cancelled)
        try:
            story.weight_version, story.started_at = version, time.time()
            self.running[request.id] = (request.key, version)
            generation = Generation(
                id=request.id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                prefix_ids=tuple(partial["ids"]) if partial else (),
                prefix_logprobs=tuple(partial["logprobs"]) if partial else (),
            )
            generated = await serving.generate(
                generation, cancelled=cancelled, deadline=self.settings.trajectory_deadline
            )
            self._leave_if_dead(serving)
            story.finish_version = serving.newest() or version
            return generated, len({version, serving.engine.version})
        finally:
            self.running.pop(request.id, None)
            serving.leave()

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
            raise LaminarError(f"trajectory {request.id} was cancelled while its reward was computed")
        return scoring.result()

    # -- what goes on beside ------------------------------------------------------------------------------

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Dask does not stop a coroutine whose result nobody wants: tell it."""
        attempt = self.attempts.get(key) if self.active else None
        if attempt is not None and is_cancelled(self.worker, key):
            attempt.set()

    async def _stream(self) -> None:
        """Send new tokens of all running trajectories to the partial pool, a few times a second."""
        while True:
            await asyncio.sleep(STREAM_SECONDS)
            if self.serving is None:
                continue
            items = []
            for delta in self.serving.engine.progress():
                self.tokens += len(delta.ids)
                entry = self.running.get(delta.id)
                if entry is None or not entry[0].startswith("rollout-"):
                    continue
                key, version = entry
                run_id = run_id_of(self.worker, key)
                items.append([delta.id, run_id, version, delta.start, list(delta.ids), list(delta.logprobs)])
            if not items:
                continue
            try:
                await self.outbox.partials(items)
            except (OSError, LaminarError) as error:
                # The finished row carries all tokens; only a death before that would cost these.
                logger.warning("%d partial responses were not streamed: %s", len(items), error)

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
            "tokens": self.tokens,
            "finished": self.finished,
            "busy": self.serving.busy_seconds(),
            "up": time.monotonic() - self.began,
        }
