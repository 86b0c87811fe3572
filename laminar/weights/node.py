"""A relay's data plane: receives a version, proves it chunk by chunk, and sends it on while it still comes in.

All of it runs in threads of its own. Whoever plans the chains (the scheduler) calls ``send`` on the relay that
holds a version, and hears of what happens by reports; the chain itself is repaired without being told.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from laminar.errors import LaminarError
from laminar.weights.chain import Fence, Plan
from laminar.weights.forward import PROGRESS_DEADLINE, Forwarder, Links, Outgoing, Refused, Report
from laminar.weights.incoming import Damaged
from laminar.weights.lifeline import Lifeline
from laminar.weights.owner import SegmentOwner
from laminar.weights.prefix import Prefix
from laminar.weights.reception import (
    FRAME_DEADLINE,
    Key,
    NodeStatus,
    Reception,
    agree,
    busy,
    changes_to_send,
    receive_changes,
    receive_whole,
    wanted_changes,
)
from laminar.weights.shards import Shard
from laminar.weights.transport import Listener, Peer, PeerLost, Transport
from laminar.weights.wire import Frame, Kind, Speech

__all__ = ["NICE", "RelayNode"]

logger = logging.getLogger(__name__)

NICE = 10
"""Of the threads that carry weights: trainer and replicas of the same host go first, with nine tenths of a core."""

TURN_DEADLINE = 5.0
"""Seconds for a thread whose connection was broken to leave a version alone."""


class RelayNode:
    """Listens for predecessors and feeds successors.

    Parameters
    ----------
    owner
        The segment of this host.
    run
        What is sent for another run is refused.
    token
        What the relays of one scheduler know each other by: who does not know it is refused.
    host, port
        Where to listen; port 0 takes a free one.
    report
        Called from the node's threads with everything that happens; must return at once.
    progress_deadline
        Seconds without a sign of life after which a relay counts as frozen.

    Raises
    ------
    LaminarError
        The port is taken.
    """

    def __init__(
        self,
        owner: SegmentOwner,
        transport: Transport,
        *,
        run: str,
        token: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        report: Callable[[Report], None] = lambda report: None,
        progress_deadline: float = PROGRESS_DEADLINE,
    ) -> None:
        self.owner = owner
        self.run = run
        self._token = token
        self._report = report
        self._deadline = progress_deadline
        self._listener: Listener = transport.listen(host, port)
        self.address = self._listener.address
        self._lifeline = Lifeline()
        self._lifeline.add(self._listener.socket)
        self._links = Links(transport, progress_deadline, self._lifeline)
        self._mutex = threading.Lock()
        self._admitting = threading.Lock()
        self._committing = threading.Lock()
        self._receptions: dict[Key, Reception] = {}
        self._peers: set[Peer] = set()
        self._closed = threading.Event()
        self._bytes_in = self._bytes_out = self._repairs = 0
        self._position: int | None = None
        for target in (self._listen, self._watch):
            threading.Thread(target=target, name=f"laminar-relay{target.__name__}", daemon=True).start()

    # -- what others call ---------------------------------------------------------------------------------

    def send(self, plan: Plan) -> None:
        """Feed the chain of a plan, as its first member. Returns at once; reports tell the rest.

        Raises
        ------
        LookupError
            The version cannot be read here.
        """
        with self._admitting:
            self._position = 0
            reception = self._readable(plan, Fence(plan.epoch, -1))
        threading.Thread(target=self._start, args=(reception, plan), name="laminar-start", daemon=True).start()

    def adopt(self, version: int, shard: Shard) -> None:
        """Take up the part of a version that a shard of the trainer has staged on this host: ``send`` sends it, and the
        version can be read here once the other parts have come. An older one that was not sent yet is dropped.

        Raises
        ------
        LookupError, ValueError, LaminarError
            As ``SegmentOwner.adopt``.
        """
        with self._admitting:
            key = (version, shard.part)
            with self._mutex:
                over = [it for it in self._receptions.values() if it.fence.epoch < 0 and it.key[0] < version]
                if key in self._receptions:
                    return  # asked twice
            for reception in over:
                self._drop(reception)
            incoming = self.owner.adopt(version, shard)
            part = incoming.range(shard.part, shard.start, shard.stop)
            with self._mutex:
                self._receptions[key] = Reception(key, Fence(-1, -1), incoming.slot, part.prefix, incoming, part)

    def _start(self, reception: Reception, plan: Plan) -> None:
        """Find out what changed, where that may be worth it, and send."""
        _give_way()
        try:
            if reception.changes is None:
                reception.changes = changes_to_send(plan, self.owner, self._links.rate)
            with self._admitting:
                self._forward(reception, plan, 0, reception.slot.digest if plan.parts == 1 else "")
        except (LaminarError, LookupError) as error:
            logger.warning("version %d is not sent: %s", plan.version, error)
            self._tell("failed", reception, str(error))

    @property
    def link_rate(self) -> float | None:
        """Bytes/s at which this relay last sent a whole version: what the choice of whole or changes rests on."""
        return self._links.rate

    @link_rate.setter
    def link_rate(self, rate: float) -> None:
        self._links.rate = rate

    def status(self) -> NodeStatus:
        """What was done so far."""
        with self._mutex:
            coming = [it for it in self._receptions.values() if it.incoming and not it.prefix.whole]
        newest = max(coming, key=lambda it: it.key, default=None)
        receiving = (newest.key[0], newest.prefix.have - newest.prefix.start) if newest else None
        return NodeStatus(self._bytes_in, self._bytes_out, self._position, self._repairs, receiving)

    def held(self, version: int, part: int = 0) -> int:
        """Bytes of a version's range that are here."""
        with self._mutex:
            reception = self._receptions.get((version, part))
        if reception is not None:
            return reception.prefix.have - reception.prefix.start
        layout = self.owner.layout
        return layout.nbytes if layout is not None and version in self.owner.held() else 0

    def close(self) -> None:
        """Stop listening, receiving and sending. Idempotent."""
        self._closed.set()
        self._listener.close()
        with self._mutex:
            receptions, peers = list(self._receptions.values()), list(self._peers)
        for peer in peers:
            peer.hang_up()
        for reception in receptions:
            self._drop(reception)
        self._links.close()
        self._lifeline.close()

    # -- threads ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        _give_way()
        while not self._closed.is_set():
            try:
                peer = self._listener.accept()
            except PeerLost as error:
                if not self._closed.is_set():
                    logger.error("the relay hears nobody any more: %s", error)
                return
            self._lifeline.add(peer.socket)
            threading.Thread(target=self._serve, args=(peer,), name="laminar-receive", daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        """Receive version after version from one predecessor, until it hangs up."""
        with self._mutex:
            self._peers.add(peer)
        try:
            while not self._closed.is_set():
                frame = peer.read(None)
                if frame.kind is not Kind.HELLO:
                    raise Speech(f"{peer.address} said {frame.kind.name}, expected HELLO")
                try:
                    self._take(peer, frame)
                except Refused as refusal:
                    logger.info("refused %s: %s", peer.address, refusal)
                    peer.send(Kind.REFUSED, {"kind": refusal.kind, "why": str(refusal)})
        except PeerLost as error:
            logger.debug("%s", error)
        except (LaminarError, LookupError, ValueError, struct.error) as error:
            logger.warning("the relay closes a connection: %s: %s", type(error).__name__, error)
        finally:
            with self._mutex:
                self._peers.discard(peer)
            peer.close()

    def _watch(self) -> None:
        """Say so when nothing comes for a version that is not whole: its sender may be frozen."""
        seen: dict[Key, tuple[int, float]] = {}
        while not self._closed.wait(self._deadline / 4):
            now = time.monotonic()
            with self._mutex:
                waiting = {key: it for key, it in self._receptions.items() if not it.prefix.whole}
            seen = {key: value for key, value in seen.items() if key in waiting}
            for key, reception in waiting.items():
                have, since = seen.get(key, (-1, now))
                if have != reception.prefix.have:
                    seen[key] = (reception.prefix.have, now)
                elif now - since > self._deadline:
                    seen[key] = (have, now)
                    self._tell("starving", reception)

    # -- receiving ----------------------------------------------------------------------------------------

    def _take(self, peer: Peer, hello: Frame) -> None:
        """One version's range from one predecessor: admit, receive, commit, and wait for all behind."""
        values = hello.values()
        plan, position = Plan.from_dict(values["plan"]), int(values["to"])
        agree(peer, values, self.owner, self.run, self._token)
        with busy(peer), self._admitting:
            reception = self._admit(plan, Fence(plan.epoch, int(values["position"])), peer)
            self._position = position
        if not reception.turn.acquire(timeout=TURN_DEADLINE):
            raise Refused("busy", f"version {plan.version} is still being received by another connection")
        try:
            if reception.peer is not peer:
                raise Refused("skipped", f"another relay sends version {plan.version} now")
            self._receive(peer, reception, plan, position, values)
        finally:
            if reception.peer is peer:
                reception.peer = None
            reception.turn.release()

    def _admit(self, plan: Plan, fence: Fence, peer: Peer) -> Reception:
        """The reception that a connection may go on with; whoever sent before is cut off."""
        key = (plan.version, plan.part)
        with self._mutex:
            others = [it for it in self._receptions.values() if it.key[0] != plan.version and it.fence.epoch >= 0]
            reception = self._receptions.get(key)
        newest = max((it.key[0] for it in others), default=-1)
        head = self.owner.head()
        if plan.version < max(newest, -1 if head is None else head):
            raise Refused("overtaken", f"version {plan.version} was overtaken by {max(newest, head or 0)}")
        if reception is not None and not reception.fence.gives_way_to(fence):
            raise Refused("skipped", f"version {plan.version} comes from a relay further ahead")
        if reception is None:
            for other in others:
                self._drop(other)
            reception = self._readable(plan, fence) if head == plan.version else self._begin(plan, fence)
        before, reception.peer, reception.fence = reception.peer, peer, fence
        if before is not None and before is not peer:
            before.hang_up()
        return reception

    def _begin(self, plan: Plan, fence: Fence) -> Reception:
        """Start to receive a version into a free slot, or a further range of it."""
        with self._mutex:
            same = [it for it in self._receptions.values() if it.key[0] == plan.version and it.incoming]
        try:
            incoming = same[0].incoming if same else self.owner.receive(plan.version, parts=plan.parts)
        except TimeoutError as error:
            raise Refused("busy", str(error)) from error
        except ValueError as error:
            raise Refused("overtaken", str(error)) from error
        assert incoming is not None
        part = incoming.range(plan.part, plan.start, plan.stop)
        reception = Reception((plan.version, plan.part), fence, incoming.slot, part.prefix, incoming, part)
        with self._mutex:
            self._receptions[reception.key] = reception
        return reception

    def _readable(self, plan: Plan, fence: Fence) -> Reception:
        """A version that can be read here, to be sent on. Raises ``LookupError`` where it cannot."""
        key = (plan.version, plan.part)
        with self._mutex:
            reception = self._receptions.get(key)
        if reception is not None and reception.prefix.whole:
            reception.fence = fence
            return reception
        with self.owner.pinned(plan.version) as slot:
            reception = Reception(key, fence, slot, Prefix(plan.start, plan.stop, plan.stop))
        with self._mutex:
            over = [old for old, it in self._receptions.items() if it.forwarder and it.forwarder.done.is_set()]
            for old in over:
                del self._receptions[old]
            self._receptions[key] = reception
        return reception

    def _receive(self, peer: Peer, reception: Reception, plan: Plan, position: int, values: dict[str, Any]) -> None:
        digest = str(values["digest"])
        changes = wanted_changes(reception, plan, values["changes"], self.owner)
        offset = reception.prefix.have if changes is None else changes.prefix.have
        peer.send(Kind.HAVE, {"offset": offset, "layout": False, "changes": changes is not None})
        frame = peer.read(FRAME_DEADLINE)
        if frame.kind is not Kind.HASHES:
            raise Speech(f"{peer.address} said {frame.kind.name}, expected HASHES")
        if reception.range is not None and not reception.prefix.whole:
            reception.range.expect(struct.unpack(f"<{len(frame.body) // 8}Q", frame.body))
        if changes is None and reception.changes is not None and not reception.changes.prefix.whole:
            reception.changes = None  # the rest of them will not come: whoever is behind gets the whole version too
        self._forward(reception, plan, position, digest)
        try:
            if changes is not None:
                receive_changes(peer, reception, plan, changes, self.owner, self._arrived)
            elif not reception.prefix.whole:
                receive_whole(peer, reception, plan, self._arrived)
        except Damaged as error:
            self._tell("damaged", reception, str(error))
            raise PeerLost(f"{peer.address}: {error}") from error
        if reception.incoming is not None and reception.incoming.whole:
            self._commit(reception, digest)
        forwarder = reception.forwarder
        assert forwarder is not None
        while not forwarder.done.wait(self._deadline / 4):
            peer.send(Kind.BUSY)
        peer.send(Kind.DONE)

    def _arrived(self, reception: Reception, nbytes: int, first: bool) -> None:
        self._bytes_in += nbytes
        if first:
            self._tell("fed", reception)

    def _commit(self, reception: Reception, digest: str) -> None:
        """Make the version readable, and keep it from being recycled while it is still sent on."""
        incoming = reception.incoming
        assert incoming is not None
        with self._committing:
            if incoming.lock is None:
                return  # done already, by the thread of another range
            try:
                self.owner.commit(incoming, digest)
            except (LaminarError, ValueError):
                incoming.abandon()
                with self._mutex:
                    self._receptions.pop(reception.key, None)
                raise
        with self._mutex:
            forwarders = [it.forwarder for it in self._receptions.values() if it.incoming is incoming and it.forwarder]
        for forwarder in forwarders:
            self._pin(forwarder, incoming.version)
        self._tell("promoted", reception)

    # -- sending ------------------------------------------------------------------------------------------

    def _forward(self, reception: Reception, plan: Plan, position: int, digest: str) -> None:
        """Feed those behind, unless that is done already by this plan."""
        before = reception.forwarder
        if before is not None:
            dead_end = before.outgoing.changes
            if before.outgoing.plan.epoch >= plan.epoch and (
                dead_end is None or dead_end is reception.changes or dead_end.prefix.whole
            ):
                return
            before.cancel()
        reception.forwarder = Forwarder(
            self._links,
            Outgoing(
                plan, position, self.run, reception.slot, digest, reception.prefix, reception.changes, self._token
            ),
            fed=reception.fed,
            report=self._from_forwarder,
            sent=self._count_sent,
        )
        if reception.incoming is None or reception.incoming.lock is None:
            self._pin(reception.forwarder, plan.version)

    def _pin(self, forwarder: Forwarder, version: int) -> None:
        stack = ExitStack()
        stack.enter_context(self.owner.pinned(version))
        forwarder.at_end(stack)

    def _count_sent(self, nbytes: int) -> None:
        self._bytes_out += nbytes

    def _from_forwarder(self, report: Report) -> None:
        self._repairs += report.what == "lost"
        self._report(report)

    def _drop(self, reception: Reception) -> None:
        """Nobody wants this version any more: stop receiving and sending it, give an unfinished slot back."""
        with self._mutex:
            self._receptions.pop(reception.key, None)
        peer = reception.peer
        if peer is not None:
            peer.hang_up()
        if reception.forwarder is not None:
            reception.forwarder.cancel()
        if reception.turn.acquire(timeout=TURN_DEADLINE):
            try:
                if reception.incoming is not None:
                    reception.incoming.abandon()
            finally:
                reception.turn.release()

    def _tell(self, what: str, reception: Reception, why: str = "") -> None:
        version, part = reception.key
        self._report(Report(what, version, part, reception.fence.epoch, "", why, time.time()))


def _give_way() -> None:
    """Lower this thread's priority (Linux has one for each), and that of those it starts from now on."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
