"""The relay: keeps a host's weight versions in shared memory. A worker plugin in a process without torch.

The trainer stages a version with ``laminar.weights.publisher`` and announces it here; the relay proves it
whole and makes it the newest; replicas map it with ``laminar.weights.reader`` and talk to nobody. Dask
carries control only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from distributed import Worker, WorkerPlugin

from laminar.errors import LaminarError
from laminar.weights.chain import Plan
from laminar.weights.forward import Report
from laminar.weights.layout import Layout
from laminar.weights.node import RelayNode
from laminar.weights.owner import SegmentOwner
from laminar.weights.reader import WeightReader
from laminar.weights.segment import host_label, remove_segments, segment_root, sweep
from laminar.weights.shards import Shard
from laminar.weights.stand_in import StandIn
from laminar.weights.transport import choose, open_transport, split_address
from laminar_dask._compat import add_metric, has_role, remove_metric
from laminar_dask.waiting import within

__all__ = ["RelayPlugin", "announce", "prepare"]

logger = logging.getLogger(__name__)

SCHEDULER_DEADLINE = 5.0
"""Seconds for the scheduler to take a message."""
TOKEN_DEADLINE = 60.0
"""Seconds for it to answer a relay that starts, while the whole cluster does."""


class RelayPlugin(WorkerPlugin):
    """Owns the segment of one run on this host and its place in the chain, on a worker with the resource ``relay``.

    A relay that was killed leaves its files, and the one that takes its place goes on with them (with none, where
    they are damaged: the versions come from the others or from the trainer). One that ends in order removes them. On
    a worker with the resource ``trainer`` it is ready to send what a dead relay left. On all others it does nothing.

    Parameters
    ----------
    run
        The run's id.
    transport
        ``tcp`` or ``ucx``; empty: the better one that is here (``laminar.weights.transport.choose``).

    RPC, each answered off the event loop:

    - ``laminar_relay_prepare(layout)``: take the memory for this layout; twice is once.
    - ``laminar_relay_published(version)``: prove a staged version whole and make it the newest; gives
      ``{"status": "published", "version", "digest", "seconds"}``. The chain starts without being waited for.
    - ``laminar_relay_handed_over(version, shard)``: the same for one part of a version, of a trainer with several
      shards; gives ``{"status": "handed over"}``. The version can be read once the other parts have come.
    - ``laminar_relay_status()``: ``{"version", "held", "bytes", "layout", "transport", ...}``.
    - ``laminar_relay_send(plan)``, ``laminar_relay_held(version, part)``: for the owner of the chains.
    - ``laminar_relay_can_stand_in(version)``, ``laminar_relay_stand_in(plan)``: the same, of the trainer's worker.
    """

    name = "laminar-relay"

    def __init__(self, run: str, transport: str = "") -> None:
        self.run = run
        self.transport = transport
        self.owner: SegmentOwner | None = None
        self.node: RelayNode | None = None
        self.stand_in: StandIn | None = None
        self.token = ""

    async def setup(self, worker: Worker) -> None:
        """Take the segment up, remove what dead runs left, answer calls and join the chain."""
        self.worker = worker
        if has_role(worker, "trainer") or has_role(worker, "relay"):
            self.token = await _token(worker)
        if has_role(worker, "trainer"):
            worker.handlers["laminar_relay_can_stand_in"] = self.can_stand_in
            worker.handlers["laminar_relay_stand_in"] = self.send_instead
        if not has_role(worker, "relay"):
            return
        self.owner = await asyncio.to_thread(_take_up, segment_root(self.run))
        gone = await asyncio.to_thread(sweep)
        if gone:
            logger.info("removed the weights that dead runs left: %s", ", ".join(gone))
        if self.owner.head() is not None:
            logger.info("took up versions %s of run %s", self.owner.held(), self.run)
        self.node = await asyncio.to_thread(self._listen)
        for name, handler in self._handlers().items():
            worker.handlers[name] = handler
        add_metric(worker, "laminar_relay", self.metrics)
        await self._tell_scheduler("join", host=_host(worker), address=self.node.address, version=self.owner.head())

    async def teardown(self, worker: Worker) -> None:
        """Remove the files. Replicas keep what they have mapped."""
        for name in ("laminar_relay_can_stand_in", "laminar_relay_stand_in"):
            worker.handlers.pop(name, None)
        if self.stand_in is not None:
            await asyncio.to_thread(self.stand_in.close)
        if self.owner is not None and self.node is not None:
            for name in self._handlers():
                worker.handlers.pop(name, None)
            remove_metric(worker, "laminar_relay")
            await asyncio.to_thread(self.node.close)
            await asyncio.to_thread(self.owner.close)

    # -- calls from the trainer ---------------------------------------------------------------------------

    async def prepare(self, layout: dict[str, Any]) -> dict[str, Any]:
        """RPC: take the memory for a layout."""
        await asyncio.to_thread(self._segments().prepare, Layout.from_dict(layout))
        return await self.status()

    async def published(self, version: int) -> dict[str, Any]:
        """RPC: make a staged version the newest that replicas can read, and let the chain carry it to the others."""
        done = await asyncio.to_thread(self._segments().promote, version)
        await self._tell_scheduler("published", version=version)
        return {
            "status": "published",
            "version": done.version,
            "digest": done.digest,
            "seconds": done.seconds,
        }

    async def handed_over(self, version: int, shard: dict[str, int]) -> dict[str, Any]:
        """RPC: take up the part of a version that a shard has staged; the chains carry it once all are there."""
        assert self.node is not None
        await asyncio.to_thread(self.node.adopt, version, Shard.from_dict(shard))
        await self._tell_scheduler("handed_over", version=version, shard=shard)
        return {"status": "handed over", "version": version}

    # -- calls from the owner of the chains -----------------------------------------------------------------

    async def send(self, plan: dict[str, Any]) -> str:
        """RPC: feed a chain, as its first member."""
        assert self.node is not None
        await asyncio.to_thread(self.node.send, Plan.from_dict(plan))
        return "sending"

    async def held(self, version: int, part: int = 0) -> int:
        """RPC: bytes of a version, or of a part of one, that are here."""
        assert self.node is not None
        return self.node.held(version, part)

    async def can_stand_in(self, version: int) -> bool:
        """RPC of the trainer's worker: whether the relay of its host left this version."""
        return await asyncio.to_thread(_left, segment_root(self.run), version)

    async def send_instead(self, plan: dict[str, Any]) -> str:
        """RPC of the trainer's worker: feed a chain out of what the dead relay of its host left."""
        await asyncio.to_thread(self._send_instead, Plan.from_dict(plan))
        return "sending"

    # -- watching -------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """RPC: what this relay holds."""
        return {**self.metrics(self.worker), "layout": self._segments().status().layout}

    def metrics(self, worker: Worker) -> dict[str, Any]:
        """Sent with the worker's heartbeat as ``laminar_relay``.

        ``version``, ``held`` and ``bytes`` of shared memory; ``bytes_in`` and ``bytes_out`` of the data plane;
        ``position`` in the newest chain; ``lag``: versions behind the newest it has seen a sender offer;
        ``repairs``: relays it has passed over; ``transport``.
        """
        assert self.node is not None
        now, wire = self._segments().status(), self.node.status()
        offered = wire.receiving[0] if wire.receiving else now.version
        lag = 0 if offered is None else offered - (now.version if now.version is not None else -1)
        return {
            "version": now.version,
            "held": now.held,
            "bytes": now.nbytes,
            "bytes_in": wire.bytes_in,
            "bytes_out": wire.bytes_out,
            "position": wire.position,
            "lag": lag,
            "repairs": wire.repairs,
            "transport": self.chosen.name,
        }

    # -- inside -----------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        calls = (self.prepare, self.published, self.handed_over, self.status, self.send, self.held)
        return {f"laminar_relay_{call.__name__}": call for call in calls}

    def _listen(self) -> RelayNode:
        self.chosen = choose(self.transport)
        logger.info("relay by %s: %s", self.chosen.name, self.chosen.why)
        return RelayNode(
            self._segments(),
            open_transport(self.chosen.name),
            run=self.run,
            token=self.token,
            host=_ip(self.worker),
            report=self._report,
        )

    def _send_instead(self, plan: Plan) -> None:
        if self.stand_in is None:
            name = split_address(plan.members[1].address)[0]
            root = segment_root(self.run)
            transport = open_transport(name)
            self.stand_in = StandIn(root, transport, run=self.run, token=self.token, report=self._report)
        self.stand_in.send(plan)

    def _report(self, report: Report) -> None:
        """From the data plane's threads."""
        message = {
            "op": "laminar-chain-report",
            "what": report.what,
            "version": report.version,
            "epoch": report.epoch,
            "member": report.member,
            "why": report.why,
        }
        self.worker.loop.add_callback(self.worker.batched_send, message)

    async def _tell_scheduler(self, what: str, **values: Any) -> None:
        """Tell the owner of the chains, if there is one: without it, this relay serves its host alone."""
        layout = self._segments().layout
        nbytes = layout.nbytes if layout else 0
        call = getattr(self.worker.scheduler, f"laminar_chain_{what}")
        try:
            answered = call(relay=self.worker.address, nbytes=nbytes, **values)
            answer = await within(SCHEDULER_DEADLINE, answered)
        except (TimeoutError, OSError) as error:
            logger.warning("the scheduler was not told `%s`: %s", what, error)
            return
        if answer is None:
            logger.info("nobody owns the chains of this cluster: this relay serves its host alone")

    def _segments(self) -> SegmentOwner:
        assert self.owner is not None, "only a worker with the resource relay has these handlers"
        return self.owner


async def prepare(worker: Worker, relay: str, layout: Layout, *, deadline: float = 30.0) -> dict[str, Any]:
    """Ask a relay to take the memory for a layout; the trainer does so before its first version.

    Where there are several relays, the one of the caller's host is asked, whichever is given.

    Raises
    ------
    LaminarError
        The relay does not answer, holds another layout, or has too little memory.
    """
    relay = await _own(worker, relay)
    call = worker.rpc(relay).laminar_relay_prepare(layout=layout.to_dict())
    return await _answered(call, relay, f"prepare layout {layout.hash}", deadline)


async def announce(
    worker: Worker, relay: str, version: int, *, shard: Shard | None = None, deadline: float = 10.0
) -> dict[str, Any]:
    """Tell a relay that a version is staged, and return its answer once the version can be read.

    With a ``shard`` it is told of that part, and answers at once: the version can be read when all parts are there.

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
    relay = await _own(worker, relay)
    if shard is not None:
        call = worker.rpc(relay).laminar_relay_handed_over(version=version, shard=shard.to_dict())
        return await _answered(call, relay, f"take up part {shard.part} of version {version}", deadline)
    call = worker.rpc(relay).laminar_relay_published(version=version)
    return await _answered(call, relay, f"publish version {version}", deadline)


async def _answered(call: Awaitable[dict[str, Any]], relay: str, what: str, deadline: float) -> dict[str, Any]:
    try:
        return await within(deadline, call)
    except TimeoutError as error:
        raise LaminarError(f"relay {relay} did not {what} within {deadline:g} s") from error
    except OSError as error:
        raise LaminarError(f"relay {relay} could not {what}: {error}") from error


async def _token(worker: Worker) -> str:
    """What the relays of this scheduler know each other by; empty where nobody owns the chains, so that none sends.

    Raises
    ------
    LaminarError
        The scheduler does not answer.
    """
    try:
        return str(await within(TOKEN_DEADLINE, worker.scheduler.laminar_chain_token()) or "")
    except TimeoutError as error:
        raise LaminarError(f"the scheduler did not say the relays' token within {TOKEN_DEADLINE:g} s") from error


async def _own(worker: Worker, relay: str) -> str:
    """The relay of this worker's host, which shares its memory; the given one where nobody owns the chains."""
    found: Any = await worker.scheduler.laminar_chain_relay(host=_host(worker))
    return str(found) if found else relay


def _take_up(root: Path) -> SegmentOwner:
    """What the relay before has left, or an empty segment where that is damaged."""
    try:
        return SegmentOwner(root)
    except LaminarError as error:
        logger.error("the relay starts with nothing: %s", error)
        remove_segments(root)  # whoever has it mapped keeps what is mapped
        return SegmentOwner(root)


def _host(worker: Worker) -> str:
    """The name by which workers that share memory know each other."""
    return host_label() or _ip(worker)


def _ip(worker: Worker) -> str:
    return str(worker.address).rpartition(":")[0].rpartition("/")[2]


def _left(root: Path, version: int) -> bool:
    reader = WeightReader(root)
    try:
        return version in reader.held()
    finally:
        reader.close()
