"""Step 5: the trainer's weights into the relay's segment, and word of them to the relay.

Training waits for none of it. A version that could not be published is left out, since the next one makes up for it;
but where there is no next one soon (the trainer waits for rows, or the run ends) it is published after all: with a
staleness ceiling of 0, replicas that never get the version would leave the trainer waiting for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from distributed import Worker

from laminar.errors import LaminarError
from laminar.trajectory import Version
from laminar_dask.relay import announce, prepare
from laminar_dask.roles import peer

if TYPE_CHECKING:
    from laminar.trainer.learner import Learner
    from laminar.weights.publisher import Publisher

__all__ = ["Publication"]

logger = logging.getLogger(__name__)

START_DEADLINE = 120.0
"""Seconds for the relay to answer when the trainer starts, and to come back when the run ends."""
ANNOUNCE_DEADLINE = 300.0
"""Seconds in which the relay is told again and again of the newest version."""
RETRY = 0.2


class Publication:
    """Publishes what a learner holds.

    Parameters
    ----------
    checkpoints
        URL of the folder where the newest version is written down before it is published.
    in_thread
        Runs a blocking call on the thread that owns the learner.

    Attributes
    ----------
    left_out
        The newest version, if it is not in the segment.
    skipped, failed_announcements
        How often a version was left out, and how often the relay was told of one in vain.
    """

    def __init__(
        self,
        worker: Worker,
        learner: Learner,
        publisher: Publisher,
        checkpoints: str,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self.worker = worker
        self.learner = learner
        self.publisher = publisher
        self.checkpoints = checkpoints
        self.in_thread = in_thread
        self.newest: Version = -1
        self.left_out: Version | None = None
        self.skipped = 0
        self.failed_announcements = 0
        self._announcer: asyncio.Task[None] | None = None

    async def first(self) -> Version:
        """Publish as the version after the newest that this run ever had, and wait until it can be read.

        Raises
        ------
        LaminarError
            The relay does not answer, or has no room.
        """
        from laminar.trainer import checkpoint

        remembered = await self.in_thread(checkpoint.read_version, self.checkpoints)
        held = (await self._prepare(START_DEADLINE))["version"]
        version: Version = max((known for known in (remembered, held) if known is not None), default=-1) + 1
        await self.in_thread(self._stage, version)
        await self._announce_once(version, START_DEADLINE)
        self.newest = version
        return version

    async def publish(self, version: Version) -> bool:
        """Write the weights into the segment and have the relay told, in the background.

        If that is impossible (the relay has gone with its segment, all slots are being read, the number cannot be
        written down) the version is left out: rollouts go on with the one they have, and training goes on.
        """
        self.newest = version
        try:
            try:
                await self.in_thread(self._stage, version)
            except LaminarError as error:
                logger.warning("version %d: %s; preparing the relay anew", version, error)
                await self._prepare(RETRY)
                await self.in_thread(self._stage, version)
        except (LaminarError, OSError) as error:
            if self.left_out != version:
                logger.warning("version %d was not published: %s", version, error)
                self.skipped, self.left_out = self.skipped + 1, version
            return False
        self.left_out = None
        self._announcer = asyncio.create_task(self._announce(version))
        return True

    async def make_up(self, *, within: float = 0.0) -> None:
        """Publish the newest version if it was left out, trying for so many seconds."""
        until = time.monotonic() + within
        while self.left_out is not None and not await self.publish(self.left_out):
            if time.monotonic() > until:
                return
            await asyncio.sleep(RETRY)

    def close(self) -> None:
        """Let go of the segment. Idempotent."""
        if self._announcer is not None:
            self._announcer.cancel()
        self.publisher.close()

    async def _prepare(self, deadline: float) -> dict[str, Any]:
        """Have the relay take the memory for the model's weights; what it holds."""
        from laminar.weights.layout import Layout

        layout = await self.in_thread(lambda: Layout.of(self.learner.tensors()))
        relay = await peer(self.worker, "relay", deadline=deadline)
        return await prepare(self.worker, relay, layout, deadline=deadline)

    def _stage(self, version: Version) -> None:
        """One copy of the weights into the segment; the number is written down first. In the thread."""
        from laminar.trainer import checkpoint

        checkpoint.write_version(self.checkpoints, version)
        self.publisher.publish(version, self.learner.tensors())

    async def _announce(self, version: Version) -> None:
        """Tell the relay of a version until it has taken it up, or a newer one is there to tell of."""
        until = time.monotonic() + ANNOUNCE_DEADLINE
        while version == self.newest and time.monotonic() < until:
            try:
                await self._announce_once(version, ANNOUNCE_DEADLINE)
                return
            except LaminarError as error:
                self.failed_announcements += 1
                logger.warning("the relay has not taken up version %d yet: %s", version, error)
                with contextlib.suppress(LaminarError):  # it may be a new one, which has nothing
                    await self._prepare(RETRY)
            except LookupError as error:
                if version == self.newest:  # else it was overtaken by the next
                    logger.warning("version %d was lost before the relay took it up: %s", version, error)
                    self.skipped, self.left_out = self.skipped + 1, version
                return
            except ValueError as error:
                logger.info("version %d was overtaken: %s", version, error)
                return
            await asyncio.sleep(RETRY)

    async def _announce_once(self, version: Version, deadline: float) -> None:
        relay = await peer(self.worker, "relay", deadline=deadline)
        await announce(self.worker, relay, version, deadline=deadline)
