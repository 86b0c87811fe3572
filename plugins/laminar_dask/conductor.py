"""Drives one ``post_train`` stage: an async Dask task on the data worker that wires the eight steps together.

It hands whole groups to empty replicas (``feeder``), calls the trainer step by step, evaluates, and reports. It
holds no state that the files do not have: if the data worker dies, Dask runs it again and it goes on from them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Client, Worker, get_worker
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from laminar.errors import RunFailed
from laminar.flow.context import RunContext
from laminar.post_train import PostTrainSpec
from laminar.settings import Policy
from laminar.trajectory import Version
from laminar.watch.control import control_topic, stop_wanted
from laminar.watch.events import topic
from laminar_dask.evaluation import EvaluationJob, held_out_requests
from laminar_dask.feeder import Feeder
from laminar_dask.relay_chain import ChainPlugin
from laminar_dask.repack import freed_topic
from laminar_dask.reporter import Reporter
from laminar_dask.roles import RolesPlugin
from laminar_dask.stage import worker_plugins
from laminar_dask.supervisor import ActorSupervisor
from laminar_dask.table import TablePlugin
from laminar_dask.trainer_link import TrainerLink
from laminar_dask.waiting import end

__all__ = ["Conductor", "conduct"]

LEASE_POLL = 2.0
"""Seconds of one wait for a full batch; after it the conductor looks around and waits again."""
STALL_DEADLINE = 600.0
"""See ``stall_deadline``."""
SKIPPED_BATCHES = 10
"""Batches of trajectories that dynamic sampling may skip without a step before the run ends with what it has."""
CONNECTIONS = 3
"""How often the conductor may begin."""
SAY_AFTER = 10.0
"""Seconds of waiting after which the reason is shown."""


async def conduct(spec: PostTrainSpec, context: RunContext) -> Policy:
    """Run the stage to its end, a stop request, or an error; the cluster is left ready for ``evaluate``.

    Where the connection to the scheduler breaks (a starved machine is enough), the conductor starts anew from what
    the table and the trainer hold, as it would after a death of its process.
    """
    worker = get_worker()
    for attempt in range(CONNECTIONS):
        async with Client(
            worker.scheduler.address,
            asynchronous=True,
            direct_to_workers=True,
            name=f"laminar-{context.run_id}-{attempt}",
            set_as_default=False,
            security=worker.security,
        ) as client:
            conductor = Conductor(spec, context, worker, client)
            try:
                policy = await conductor.run()
            except (FutureCancelledError, CommClosedError) as lost:
                conductor.reporter.message(f"the conductor starts anew: {lost}", level="warning")
                continue
            except BaseException:
                await conductor.release()
                raise
            await conductor.release()
            return policy
    raise RunFailed(f"the conductor lost its connection to the scheduler {CONNECTIONS} times")


class Conductor:
    """The loop of one stage."""

    def __init__(self, spec: PostTrainSpec, context: RunContext, worker: Worker, client: Client) -> None:
        self.spec = spec
        self.context = context
        self.worker = worker
        self.client = client
        self.skipped = 0
        self.ended = ""
        self.stopping = False
        self.trainer: TrainerLink | None = None
        self.calls: set[asyncio.Future[Any]] = set()
        self.model = str(getattr(spec.model, "checkpoint", spec.model))
        self.reporter = Reporter(worker, context, spec)

    async def run(self) -> Policy:
        """Set up, go, wind down; whatever happened, what was measured is on disk."""
        await self._set_up()
        training = asyncio.create_task(self._train_to_the_end())
        beside = [asyncio.create_task(self.feeder.run()), asyncio.create_task(self.reporter.run())]
        try:
            await asyncio.wait([training, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in (*beside, training):
                if task.done():
                    return task.result()
            raise AssertionError("one of them is done")
        except (FutureCancelledError, CommClosedError):
            raise
        except Exception as error:
            self.reporter.message(str(error), level="error")
            raise
        finally:
            await end([training, *beside])
            await self.feeder.cancel()
            await self.reporter.close()

    async def release(self) -> None:
        """Let the trainer go."""
        if self.trainer is not None:
            await self.client.cancel([self.trainer.future], force=True)

    @property
    def step(self) -> int:
        """Optimizer steps done, as far as the trainer has said."""
        return self.trainer.step if self.trainer is not None else 0

    @property
    def version(self) -> Version:
        """Version that the trainer holds, as far as it has said."""
        return self.trainer.version if self.trainer is not None else 0

    # -- setting up ---------------------------------------------------------------------------------------

    async def _set_up(self) -> None:
        context = self.context
        for plugin in (RolesPlugin(), ActorSupervisor(), ChainPlugin()):
            await self.client.register_plugin(plugin)
        first: Any = await self.worker.scheduler.laminar_enter_stage(stage=f"post_train-{context.run_id}")
        if first:
            for plugin in worker_plugins(self.spec, context, self.model):
                await self.client.register_plugin(plugin)
        control = control_topic(context.run_id)
        self.client.subscribe_topic(control, self._control)
        if stop_wanted(await self.client.get_events(control)):  # asked before we listened
            self._stop()
        self.table_plugin: TablePlugin = self.worker.plugins[TablePlugin.name]
        self.table = self.table_plugin.table
        self.trainer = await TrainerLink.submit(
            self.client, self.worker, self.spec, context, self.model, say=self.reporter.message
        )
        await self.trainer.start()
        self.feeder = Feeder(self)
        await self.feeder.recover()
        self.reporter.feeder = self.feeder
        self.client.subscribe_topic(freed_topic(context.run_id), self.feeder.on_freed)
        self.client.subscribe_topic(topic(context.run_id), self._repacked)
        for note in self.table.notes:
            self.reporter.message(note, level="warning")
        self._evaluate_now()

    def _control(self, event: tuple[float, dict[str, Any]]) -> None:
        if stop_wanted([event]):
            self._stop()

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.reporter.message("stopping: no new trajectories; what runs is finished and kept")

    # -- the trainer's loop -------------------------------------------------------------------------------

    async def _train(self) -> None:
        trainer, stall = self._trainer(), stall_deadline(self.spec)
        waiting_since = time.monotonic()
        said = 0.0
        while self.step < self.spec.steps:
            if self.stopping and not self.feeder.busy:
                return
            data_ended = self.feeder.exhausted
            report = await trainer.train(self.spec.groups, poll=LEASE_POLL)
            if report is None:
                continue
            self.feeder.settle()
            if report["status"] == "waiting" and (data_ended or self._nothing_to_learn()):
                ready = self.table.counts()["ready"]
                why = f"the data ended after {self.spec.epochs} epochs" if data_ended else "all rewards are equal"
                self.ended = f"{why}; {ready} trajectories are left, less than a batch of {self.spec.batch_size}"
                self.reporter.message(self.ended)
                return
            if report["status"] == "waiting":
                waited = time.monotonic() - max(waiting_since, self.feeder.last_finished)
                if waited > stall:
                    raise RunFailed(f"nothing finished for {waited:.0f} s while the trainer was {report['why']}")
                if waited > SAY_AFTER and time.monotonic() - said > SAY_AFTER:
                    said = time.monotonic()
                    self.reporter.message(f"the trainer has waited {waited:.0f} s: {report['why']}")
                continue
            waiting_since = time.monotonic()
            self.skipped = self.table.counts().get("evicted_equal_rewards", 0)
            self.reporter.step(report)
            self._published()
            every = self.spec.evaluate_every
            if every and self.step % every == 0 and self.step < self.spec.steps:
                self._evaluate_now()

    def _published(self) -> None:
        """Let repack look at once; nobody waits for it."""
        call = asyncio.ensure_future(self.worker.scheduler.laminar_repack_published(version=self.version))
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    def _repacked(self, event: tuple[float, dict[str, Any]]) -> None:
        """Keep what repack does in the metrics."""
        if event[1].get("type") == "repack":
            self.reporter.metrics.write("repack", {k: v for k, v in event[1].items() if k != "type"})

    def _nothing_to_learn(self) -> bool:
        """Whether dynamic sampling has skipped many batches in a row: no group has rewards that differ."""
        skipped = self.table.counts().get("evicted_equal_rewards", 0) - self.skipped
        return skipped >= SKIPPED_BATCHES * self.spec.batch_size

    def _evaluate_now(self) -> EvaluationJob | None:
        """Queue the held-out prompts; replicas take them like any other work, training goes on."""
        if self.spec.evaluate_on is None:
            return None
        requests = held_out_requests(
            self.spec.evaluate_on,
            tokenizer=self.feeder.tokenizer,
            context=self.context,
            sampling=self.feeder.sampling,
            at_least=self.version,
            label=f"step{self.step:06d}-v{self.version}",
        )
        job = EvaluationJob(step=self.step, version=self.version, requests=requests, report=self.reporter.evaluation)
        self.feeder.evaluate(job)
        return job

    # -- winding down -------------------------------------------------------------------------------------

    async def _train_to_the_end(self) -> Policy:
        await self._train()
        status = "finished" if self.ended or self.step >= self.spec.steps else "stopped"
        self.feeder.admitting = False
        await self.feeder.cancel()
        checkpoint = await self._trainer().save()
        job = self._evaluate_now() if status == "finished" else None
        if job is not None:
            await job.finish()
        return Policy(
            checkpoint=checkpoint,
            version=self.version,
            run_id=self.context.run_id,
            step=self.step,
            sampling=self.feeder.sampling,
            score_deadline=self.spec.rollouts.score_deadline,
            evaluations=self.reporter.evaluations if job is not None else {},
            summary={
                **await self.reporter.summary(status),
                "repack": await self._repack_status(),
                **({"ended": self.ended} if self.ended else {}),
            },
        )

    async def _repack_status(self) -> dict[str, Any]:
        status: Any = await self.worker.scheduler.laminar_repack_status()
        return dict(status)

    def _trainer(self) -> TrainerLink:
        assert self.trainer is not None, "set up"
        return self.trainer


def stall_deadline(spec: PostTrainSpec) -> float:
    """Seconds without one finished trajectory or step after which the run fails and says what it waited for.

    Where trajectories may take long, so may the time until the first of them is finished.
    """
    return max(STALL_DEADLINE, 2 * spec.trajectory_deadline)
