"""The relay: keeps a host's weight versions in shared memory. A worker plugin in a process without torch.

The trainer stages a version with ``laminar.weights.publisher`` and announces it here; the relay proves it
whole and makes it the newest; replicas map it with ``laminar.weights.reader`` and talk to nobody. Dask
carries control only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from distributed import Worker, WorkerPlugin

from laminar.errors import LaminarError
from laminar.weights.layout import Layout
from laminar.weights.owner import SegmentOwner
from laminar.weights.segment import segment_root, sweep

__all__ = ["RelayPlugin", "announce", "prepare"]

logger = logging.getLogger(__name__)


class RelayPlugin(WorkerPlugin):
    """Owns the segment of one run on this host; on workers without the resource ``relay`` it does nothing.

    A relay that was killed leaves its files, and the one that takes its place goes on with them. One that
    ends in order removes them.

    RPC, each answered off the event loop:

    - ``laminar_relay_prepare(layout)``: take the memory for this layout; twice is once.
    - ``laminar_relay_published(version)``: prove a staged version whole and make it the newest; gives
      ``{"status": "published", "version", "digest", "seconds"}``.
    - ``laminar_relay_status()``: ``{"version", "held", "bytes", "layout"}``.
    """

    name = "laminar-relay"

    def __init__(self, run: str) -> None:
        self.run = run
        self.owner: SegmentOwner | None = None

    async def setup(self, worker: Worker) -> None:
        """Take the segment up, remove what dead runs left, and answer calls."""
        if "relay" not in worker.state.total_resources:
            return
        self.owner = await asyncio.to_thread(SegmentOwner, segment_root(self.run))
        gone = await asyncio.to_thread(sweep)
        if gone:
            logger.info("removed the weights that dead runs left: %s", ", ".join(gone))
        if self.owner.head() is not None:
            logger.info("took up versions %s of run %s", self.owner.held(), self.run)
        worker.handlers["laminar_relay_prepare"] = self.prepare
        worker.handlers["laminar_relay_published"] = self.published
        worker.handlers["laminar_relay_status"] = self.status
        worker.metrics["laminar_relay"] = self.metrics

    async def teardown(self, worker: Worker) -> None:
        """Remove the files. Replicas keep what they have mapped."""
        if self.owner is not None:
            for name in ("prepare", "published", "status"):
                worker.handlers.pop(f"laminar_relay_{name}", None)
            worker.metrics.pop("laminar_relay", None)
            await asyncio.to_thread(self.owner.close)

    async def prepare(self, layout: dict[str, Any]) -> dict[str, Any]:
        """RPC: take the memory for a layout."""
        await asyncio.to_thread(self._segments().prepare, Layout.from_dict(layout))
        return await self.status()

    async def published(self, version: int) -> dict[str, Any]:
        """RPC: make a staged version the newest that replicas can read."""
        done = await asyncio.to_thread(self._segments().promote, version)
        return {
            "status": "published",
            "version": done.version,
            "digest": done.digest,
            "seconds": done.seconds,
        }

    async def status(self) -> dict[str, Any]:
        """RPC: what this relay holds."""
        now = self._segments().status()
        return {"version": now.version, "held": now.held, "bytes": now.nbytes, "layout": now.layout}

    def metrics(self, worker: Worker) -> dict[str, Any]:
        """Sent with the worker's heartbeat as ``laminar_relay``."""
        now = self._segments().status()
        return {"version": now.version, "held": now.held, "bytes": now.nbytes}

    def _segments(self) -> SegmentOwner:
        assert self.owner is not None, "only a worker with the resource relay has these handlers"
        return self.owner


async def prepare(worker: Worker, relay: str, layout: Layout, *, deadline: float = 30.0) -> dict[str, Any]:
    """Ask a relay to take the memory for a layout; the trainer does so before its first version.

    Raises
    ------
    LaminarError
        The relay does not answer, holds another layout, or has too little memory.
    """
    call = worker.rpc(relay).laminar_relay_prepare(layout=layout.to_dict())
    return await _answered(call, relay, f"prepare layout {layout.hash}", deadline)


async def announce(worker: Worker, relay: str, version: int, *, deadline: float = 10.0) -> dict[str, Any]:
    """Tell a relay that a version is staged, and return its answer once the version can be read.

    Parameters
    ----------
    worker
        The caller's Dask worker, whose connection is used.
    relay
        Address of the relay's worker.
    deadline
        Seconds; hashing takes 65 ms a GiB and core.

    Raises
    ------
    LaminarError
        The relay does not answer in time, or the bytes are damaged.
    LookupError, ValueError
        As ``SegmentOwner.promote``: not staged, or overtaken.
    """
    return await _answered(
        worker.rpc(relay).laminar_relay_published(version=version),
        relay,
        f"publish version {version}",
        deadline,
    )


async def _answered(call: Awaitable[dict[str, Any]], relay: str, what: str, deadline: float) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(call, deadline)
    except TimeoutError as error:
        raise LaminarError(f"relay {relay} did not {what} within {deadline:g} s") from error
    except OSError as error:
        raise LaminarError(f"relay {relay} could not {what}: {error}") from error
