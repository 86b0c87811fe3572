"""What a replica sends to the data worker, many trajectories to a message: resumes, partials, finished rows.

Whatever queues up while one message is under way goes with the next, so that the cost of a message does not
grow with the number of trajectories. A data worker that died is found again by its role; rows are idempotent
by trajectory id and partials are fenced by Dask's ``run_id``, so sending twice is harmless.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Worker
from distributed.protocol import to_serialize

from laminar.errors import LaminarError
from laminar.experience.schema import record_batch
from laminar.experience.store import StoreError
from laminar_dask.roles import peer
from laminar_dask.waiting import within

__all__ = ["Outbox"]

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.02
"""How long the first item of a message waits for others: nothing against a trajectory, and a fraction of the
messages where many finish together."""
MESSAGE_DEADLINE = 5.0
RETRY_DEADLINE = 180.0
"""Seconds for a data worker to come back; longer than its restart, shorter than a person's patience."""


class Batcher:
    """Collects items and gives all that wait to one call of ``send``; each caller gets its own answer."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[list[Any]]]) -> None:
        self.send = send
        self.waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, item: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append((item, answer))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        while self.waiting:
            await asyncio.sleep(LINGER_SECONDS)
            batch, self.waiting = self.waiting, []
            try:
                results = await self.send([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001 - goes to every caller that waits for this message
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():
                    answer.set_result(result)


class Outbox:
    """The replica's way to the data worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._address: str | None = None
        self.resume = Batcher(self._resume)
        """``await resume((trajectory, run_id))`` -> partial as a dict, or None."""
        self.append = Batcher(self._append)
        """``await append(row)`` returns once the row is on disk."""

    async def partials(self, items: list[Any]) -> None:
        """Stream new tokens of running trajectories."""
        await self._reliably("partials", lambda rpc: rpc.laminar_partials(items=items), seconds=MESSAGE_DEADLINE)

    async def _resume(self, items: list[Any]) -> list[Any]:
        keys = [[trajectory, run_id] for trajectory, run_id in items]
        return list(await self._reliably("resume", lambda rpc: rpc.laminar_resume(keys=keys)))

    async def _append(self, rows: list[Any]) -> list[Any]:
        batch = record_batch(rows)
        await self._reliably("append", lambda rpc: rpc.laminar_append(batch=to_serialize(batch)))
        return [None] * len(rows)

    async def _reliably(
        self, what: str, call: Callable[[Any], Awaitable[Any]], *, seconds: float = RETRY_DEADLINE
    ) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                if self._address is None:
                    self._address = await peer(self.worker, "data", deadline=max(0.1, end - time.monotonic()))
                answer = await within(MESSAGE_DEADLINE, call(self.worker.rpc(self._address)))
                if answer is not None:
                    return answer
                why = "its table is not open yet"  # a restarted worker says None to what it does not know
            except (OSError, StoreError) as error:  # a full or lost store may come back: the run pauses so long
                why = str(error) or f"no answer within {MESSAGE_DEADLINE:.0f} s"
            self._address = None  # ask anew who it is
            if time.monotonic() > end:
                raise LaminarError(f"the data worker did not take `{what}` for {seconds:.0f} s: {why}")
            logger.info("%s: data worker not reachable (%s); trying again", what, why)
            await asyncio.sleep(0.2)
