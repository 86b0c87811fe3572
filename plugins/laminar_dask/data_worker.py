"""The trainer's calls to the data worker: asked again where that had to be restarted."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from distributed import Worker

from laminar.errors import RunFailed
from laminar.experience.store import StoreError
from laminar_dask.roles import peer
from laminar_dask.waiting import within

__all__ = ["CALL_DEADLINE", "RETRY", "DataWorker"]

logger = logging.getLogger(__name__)

CALL_DEADLINE = 120.0
"""Seconds for the data worker to answer, also when it has to be restarted first."""
RETRY = 0.2


class DataWorker:
    """Whoever has the role now. All calls may be repeated."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._known = ""

    async def ask(self, call: str, *, answer_within: float = CALL_DEADLINE, **arguments: Any) -> Any:
        """An RPC of the experience table. Raises ``RunFailed`` if there is no answer in time."""
        until, said = time.monotonic() + CALL_DEADLINE, ""
        while True:
            address = await peer(self.worker, "data", deadline=CALL_DEADLINE)
            try:
                await self._require_table(address)
                rpc = getattr(self.worker.rpc(address), call)
                return await within(answer_within, rpc(**arguments))
            except TimeoutError as error:
                why = f"did not answer `{call}` within {answer_within:.0f} s"
                raise RunFailed(f"the data worker {address} {why}") from error
            except (OSError, StoreError) as error:  # a full or lost store may come back: the run pauses so long
                if time.monotonic() > until:
                    raise RunFailed(
                        f"the data worker did not take `{call}` for {CALL_DEADLINE:.0f} s: {error}"
                    ) from error
                if said != str(error):
                    said = str(error)
                    logger.warning("asking the data worker %s for %s until it answers: %s", address, call, error)
                await asyncio.sleep(RETRY)

    async def _require_table(self, address: str) -> None:
        """Dask answers None to a call that a worker does not know: a commit to it would be lost unnoticed."""
        if address == self._known:
            return
        if await within(CALL_DEADLINE, self.worker.rpc(address).laminar_counts()) is None:
            raise RunFailed(f"the data worker {address} could not open the experience table; its log says why")
        self._known = address
