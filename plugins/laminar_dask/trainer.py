"""The trainer: an actor that leases complete groups, trains, publishes the new weights, and commits.

Its methods run on the worker's event loop and give all heavy work to one thread of their own, so that calls
stay short to answer while a step is computed. It waits for nobody but the data worker: a relay that is dead or
slow costs it nothing, and the version it missed is made up for by the next one.

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

from laminar.errors import LaminarError, RunFailed
from laminar.experience.store import StoreError
from laminar.trainer.config import TrainerSettings
from laminar.trajectory import Version
from laminar_dask.relay import announce, prepare
from laminar_dask.roles import peer

if TYPE_CHECKING:
    from laminar.trainer.learner import Learner
    from laminar.trainer.report import StepReport
    from laminar.weights.publisher import Publisher

__all__ = ["Trainer", "TrainerSettings"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

LESSEE = "trainer"
START_DEADLINE = 120.0
"""Seconds for the data worker and the relay to answer when the trainer starts."""
CALL_DEADLINE = 120.0
"""Seconds for the data worker to answer, also when it has to be restarted first."""
TRANSFER_DEADLINE = 60.0
"""Seconds for leased rows to arrive, after the time that was given for waiting."""
ANNOUNCE_DEADLINE = 300.0
"""Seconds in which the relay is told again and again of the newest version."""
RETRY = 0.2


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
        self.failed_announcements = 0
        self.skipped_publications = 0
        self._resumed = False
        self._busy = asyncio.Lock()
        self._uncommitted: dict[str, Any] | None = None
        self._announcer: asyncio.Task[None] | None = None
        self._idle_since = 0.0
        self._data = ""

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
                return {"status": "waiting", "why": lease["why"]}
            leased_at = time.monotonic()
            trained = await self._step(lease)
            wait, self._idle_since = leased_at - self._idle_since, time.monotonic()
            return {**trained, "wait_seconds": wait, "seconds": self._idle_since - leased_at}

    async def save(self, final: bool = False) -> str:
        """Write a checkpoint of this moment, if there is none yet; returns its URL.

        ``final`` also gives it the lasting name ``checkpoints/final``, and returns that.
        """
        async with self._busy:
            await self._commit()
            return await self._in_thread(self._save, final)

    async def status(self) -> dict[str, Any]:
        """What it does, at once, also in the middle of a step."""
        return {
            "state": self.state,
            "step": self.step,
            "version": self.version,
            "failed_announcements": self.failed_announcements,
            "skipped_publications": self.skipped_publications,
        }

    async def close(self) -> None:
        """Let go of the segment and of the thread, once it is done with what it does. Idempotent."""
        async with self._busy:
            if self._announcer is not None:
                self._announcer.cancel()
            if self.version >= 0:
                self._publisher.close()
                self._executor.shutdown()
            self.state = "closed"

    # -- starting -----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.state = "starting"
        self._worker: Worker = get_worker()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="laminar-trainer")
        self._learner, self._publisher, newest = await self._in_thread(self._open)
        self.step, self._resumed = self._learner.steps, self._learner.steps > 0
        await self._ask_data("laminar_release", lessee=LESSEE)
        await self._ask_data("laminar_rewind", step=self.step)
        held = (await self._prepare(START_DEADLINE))["version"]
        version = max((known for known in (newest, held) if known is not None), default=-1) + 1
        await self._in_thread(self._stage, version)
        await self._announce_once(version, START_DEADLINE)
        self.version = version
        self.state = "waiting"
        self._idle_since = time.monotonic()

    def _open(self) -> tuple[Learner, Publisher, Version | None]:
        """Model, optimizer and publisher, and the newest version that this run ever had. In the thread."""
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
        newest = checkpoint.read_version(settings.checkpoints)
        return learner, Publisher(segment_root(settings.run)), newest

    async def _prepare(self, deadline: float) -> dict[str, Any]:
        """Have the relay take the memory for the model's weights; what it holds."""
        from laminar.weights.layout import Layout

        layout = await self._in_thread(lambda: Layout.of(self._learner.tensors()))
        relay = await peer(self._worker, "relay", deadline=deadline)
        return await prepare(self._worker, relay, layout, deadline=deadline)

    # -- one step -----------------------------------------------------------------------------------------

    async def _lease(self, groups: int, poll: float) -> dict[str, Any]:
        """Rows for one step. What an earlier call leased without our learning of it is given back first."""
        ceiling = self.settings.staleness_ceiling
        await self._ask_data("laminar_release", lessee=LESSEE)
        lease = await self._ask_data(
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
        published = await self._publish(self.version)
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
            "checkpoint": await self._in_thread(self._save, False) if due else None,
        }

    async def _commit(self) -> None:
        """Tell the data worker which rows were trained; again, if an earlier step could not."""
        if self._uncommitted is not None:
            await self._ask_data("laminar_commit", **self._uncommitted)
            self._uncommitted = None

    async def _ask_data(self, call: str, *, answer_within: float = CALL_DEADLINE, **arguments: Any) -> Any:
        """An RPC of the data worker, asked again where the worker had to be restarted.

        All of these calls may be repeated. Raises ``RunFailed`` if there is no answer in time.
        """
        until = time.monotonic() + CALL_DEADLINE
        while True:
            address = await peer(self._worker, "data", deadline=CALL_DEADLINE)
            try:
                await self._require_table(address)
                rpc = getattr(self._worker.rpc(address), call)
                return await asyncio.wait_for(rpc(**arguments), answer_within)
            except TimeoutError as error:
                why = f"did not answer `{call}` within {answer_within:.0f} s"
                raise RunFailed(f"the data worker {address} {why}") from error
            except (OSError, StoreError) as error:  # a full or lost store may come back: the run pauses so long
                if time.monotonic() > until:
                    raise RunFailed(
                        f"the data worker did not take `{call}` for {CALL_DEADLINE:.0f} s: {error}"
                    ) from error
                logger.warning("asking the data worker %s again for %s: %s", address, call, error)
                await asyncio.sleep(RETRY)

    async def _require_table(self, data: str) -> None:
        """Dask answers None to a call that a worker does not know: a commit to it would be lost unnoticed."""
        if data == self._data:
            return
        if await asyncio.wait_for(self._worker.rpc(data).laminar_counts(), CALL_DEADLINE) is None:
            raise RunFailed(f"the data worker {data} could not open the experience table; its log says why")
        self._data = data

    # -- weights ------------------------------------------------------------------------------------------

    async def _publish(self, version: Version) -> bool:
        """Write the weights into the segment and have the relay told, in the background.

        If that is impossible (the relay has gone with its segment, or all slots are being read) the version is
        left out: rollouts go on with the one they have, and training goes on.
        """
        try:
            try:
                await self._in_thread(self._stage, version)
            except LaminarError as error:
                logger.warning("version %d: %s; preparing the relay anew", version, error)
                await self._prepare(RETRY)
                await self._in_thread(self._stage, version)
        except (LaminarError, TimeoutError) as error:
            self.skipped_publications += 1
            logger.warning("version %d was not published: %s", version, error)
            return False
        self._announcer = asyncio.create_task(self._announce(version))
        return True

    def _stage(self, version: Version) -> None:
        """One copy of the weights into the segment; the number is written down first. In the thread."""
        from laminar.trainer import checkpoint

        checkpoint.write_version(self.settings.checkpoints, version)
        self._publisher.publish(version, self._learner.tensors())

    async def _announce(self, version: Version) -> None:
        """Tell the relay of a version until it has taken it up, or a newer one is there to tell of."""
        until = time.monotonic() + ANNOUNCE_DEADLINE
        while version == self.version and time.monotonic() < until:
            try:
                await self._announce_once(version, ANNOUNCE_DEADLINE)
                return
            except LaminarError as error:
                self.failed_announcements += 1
                logger.warning("the relay has not taken up version %d yet: %s", version, error)
            except (LookupError, ValueError) as error:
                logger.info("version %d was overtaken: %s", version, error)
                return
            await asyncio.sleep(RETRY)

    async def _announce_once(self, version: Version, deadline: float) -> None:
        relay = await peer(self._worker, "relay", deadline=deadline)
        await announce(self._worker, relay, version, deadline=deadline)

    # -- the thread ---------------------------------------------------------------------------------------

    def _save(self, final: bool) -> str:
        """Write the checkpoint of this step unless it is there; in the thread."""
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
