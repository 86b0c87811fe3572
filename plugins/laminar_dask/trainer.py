"""The trainer: an actor that leases complete groups, trains, publishes the new weights, and commits.

Its methods run on the worker's event loop and give all heavy work to one thread of their own, so that calls
stay short to answer while a step is computed. It waits for nobody but the data worker: a relay that is dead or
slow costs it nothing, and the version it missed is made up for by the next one, or while there is nothing to do.

A step, in this order: lease, train, write the weights into the relay's segment, commit, checkpoint. Whatever
dies in between, no row is trained twice in the history that survives: a lease ends with its trainer, and rows
trained after the checkpoint that the next trainer starts from become ready again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import Worker, get_worker

from laminar.errors import RunFailed
from laminar.trainer.config import TrainerSettings
from laminar.trajectory import Version
from laminar_dask.data_worker import RETRY, DataWorker
from laminar_dask.publication import START_DEADLINE, Publication

if TYPE_CHECKING:
    from laminar.trainer.learner import Learner
    from laminar.trainer.report import StepReport
    from laminar.weights.publisher import Publisher

__all__ = ["Trainer", "TrainerSettings"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

LESSEE = "trainer"
TRANSFER_DEADLINE = 60.0
"""Seconds for leased rows to arrive, after the time that was given for waiting."""
SAVE_DEADLINE = 120.0
"""Seconds for a store that does not take a checkpoint to come back."""


class Trainer:
    """The actor. Making one does nothing; ``start`` loads the model.

    Attributes
    ----------
    step, version, state
        Optimizer steps done; the version of the weights held; what it does just now. Readable from afar.
    """

    step = 0
    version: Version = -1
    state = "new"

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self._resumed = False
        self._busy = asyncio.Lock()
        self._uncommitted: dict[str, Any] | None = None
        self._idle_since = 0.0

    async def start(self) -> dict[str, Any]:
        """Load the newest checkpoint, or the base model, and publish it. Started already: only the answer.

        Returns
        -------
        ``step``, ``version`` and ``resumed``: whether it goes on from a checkpoint.

        Raises
        ------
        LaminarError
            The data worker or the relay does not answer, or the relay has no room.
        """
        async with self._busy:
            if self.version < 0:
                await self._start()
            return {"step": self.step, "version": self.version, "resumed": self._resumed}

    async def train(self, groups: int, *, poll: float) -> dict[str, Any]:
        """One step, if as many complete groups can be leased within ``poll`` seconds.

        Returns
        -------
        ``{"status": "waiting", "why": …}``, or ``{"status": "trained"}`` with the fields of ``StepReport`` and

        ``step``, ``version``
            After the step: this version is the one trained *to*.
        ``wait_seconds``, ``train_seconds``, ``publish_seconds``, ``seconds``
            Since the step before until the rows were there; of the update; of the copy into the segment; of the
            whole step without the wait.
        ``published``, ``checkpoint``
            Whether the weights went into the segment; URL of a checkpoint, if it was time for one.

        Raises
        ------
        RunFailed
            Training diverged, or the data worker does not come back.
        """
        async with self._busy:
            await self._commit()
            self.state = "waiting"
            lease = await self._lease(groups, poll)
            if lease["status"] != "OK":
                await self._publication.make_up()
                return {"status": "waiting", "why": lease["why"]}
            leased_at = time.monotonic()
            trained = await self._step(lease)
            wait, self._idle_since = leased_at - self._idle_since, time.monotonic()
            return {**trained, "wait_seconds": wait, "seconds": self._idle_since - leased_at}

    async def save(self, final: bool = False) -> str:
        """Write a checkpoint of this moment, if there is none yet; returns its URL.

        ``final`` also gives it the lasting name ``checkpoints/final``, and returns that; no version follows, so that
        the newest one is published now if it was left out.
        """
        async with self._busy:
            await self._commit()
            if final:
                await self._publication.make_up(within=START_DEADLINE)
            return await self._save(final)

    async def status(self) -> dict[str, Any]:
        """What it does, at once, also in the middle of a step."""
        started = self.version >= 0
        return {
            "state": self.state,
            "step": self.step,
            "version": self.version,
            "failed_announcements": self._publication.failed_announcements if started else 0,
            "skipped_publications": self._publication.skipped if started else 0,
        }

    async def close(self) -> None:
        """Let go of the segment and of the thread, once it is done with what it does. Idempotent."""
        async with self._busy:
            if self.version >= 0:
                self._publication.close()
                self._executor.shutdown()
            self.state = "closed"

    # -- starting -----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.state = "starting"
        self._worker: Worker = get_worker()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="laminar-trainer")
        self._data = DataWorker(self._worker)
        self._learner, publisher = await self._in_thread(self._open)
        self.step, self._resumed = self._learner.steps, self._learner.steps > 0
        await self._data.ask("laminar_release", lessee=LESSEE)
        await self._data.ask("laminar_rewind", step=self.step)
        self._publication = Publication(
            self._worker, self._learner, publisher, self.settings.checkpoints, self._in_thread
        )
        self.version = await self._publication.first()
        self.state = "waiting"
        self._idle_since = time.monotonic()

    def _open(self) -> tuple[Learner, Publisher]:
        """Model, optimizer and publisher. In the thread."""
        import torch

        from laminar.trainer import checkpoint
        from laminar.trainer.learner import Learner
        from laminar.weights.publisher import Publisher
        from laminar.weights.segment import segment_root

        settings = self.settings
        torch.set_num_threads(settings.threads)
        found = checkpoint.latest(settings.checkpoints)
        load = partial(Learner, settings.model) if found is None else partial(Learner.load, found.url)
        learner = load(
            settings.algorithm,
            settings.optimizer,
            temperature=settings.temperature,
            seed=settings.seed,
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
            dtype=settings.dtype,
            device=settings.device,
        )
        return learner, Publisher(segment_root(settings.run))

    # -- one step -----------------------------------------------------------------------------------------

    async def _lease(self, groups: int, poll: float) -> dict[str, Any]:
        """Rows for one step. What an earlier call leased without our learning of it is given back first."""
        ceiling = self.settings.staleness_ceiling
        await self._data.ask("laminar_release", lessee=LESSEE)
        lease = await self._data.ask(
            "laminar_lease",
            answer_within=poll + TRANSFER_DEADLINE,
            groups=groups,
            version=self.version,
            staleness_ceiling=ceiling,
            lessee=LESSEE,
            deadline=poll,
        )
        return {"why": "the lease was superseded", **lease}

    async def _step(self, lease: dict[str, Any]) -> dict[str, Any]:
        """Train on leased rows, publish, commit, and keep a checkpoint where one is due."""
        old = self.version
        self.state = "training"
        report: StepReport = await self._in_thread(
            self._learner.step,
            lease["table"],
            version=old,
            staleness_ceiling=self.settings.staleness_ceiling,
        )
        self._uncommitted = {
            "lease": lease["lease"],
            "step": self.step + 1,
            "version": old,
            "groups": lease["groups"],
        }
        self.step, self.version = self.step + 1, old + 1
        self.state = "publishing"
        started = time.perf_counter()
        published = await self._publication.publish(self.version)
        publish_seconds = time.perf_counter() - started
        self.state = "committing"
        await self._commit()
        due = self.step % self.settings.checkpoint_every == 0
        self.state = "saving"
        return {
            **report.as_dict(),
            "status": "trained",
            "step": self.step,
            "version": self.version,
            "train_seconds": report.seconds,
            "publish_seconds": publish_seconds,
            "published": published,
            "checkpoint": await self._save(final=False) if due else None,
        }

    async def _commit(self) -> None:
        """Tell the data worker which rows were trained; again, if an earlier step could not."""
        if self._uncommitted is not None:
            await self._data.ask("laminar_commit", **self._uncommitted)
            self._uncommitted = None

    # -- checkpoints --------------------------------------------------------------------------------------

    async def _save(self, final: bool) -> str:
        """Write the checkpoint of this step, trying as long as a store that is full or gone may take to come back."""
        until = time.monotonic() + SAVE_DEADLINE
        while True:
            try:
                return await self._in_thread(self._write, final)
            except OSError as error:
                if time.monotonic() > until:
                    raise RunFailed(
                        f"no checkpoint of step {self.step} could be written to {self.settings.checkpoints} for "
                        f"{SAVE_DEADLINE:.0f} s: {error}; make room or give it back, then resume the run"
                    ) from error
                logger.warning("the checkpoint of step %d is tried again: %s", self.step, error)
                await asyncio.sleep(RETRY)

    def _write(self, final: bool) -> str:
        """The checkpoint of this step, unless it is there; in the thread."""
        from laminar.trainer import checkpoint

        folder = self.settings.checkpoints
        url = checkpoint.step_folder(folder, self.step)
        if checkpoint.read(url) is None:
            self._learner.save(url, step=self.step, version=self.version, extra={"run": self.settings.run})
            checkpoint.prune(folder, keep=self.settings.keep)
        return checkpoint.mark_final(folder, url) if final else url

    async def _in_thread(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._executor, partial(call, *arguments, **named))
