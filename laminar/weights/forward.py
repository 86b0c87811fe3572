"""The sending half of a chain: feed the next relay that answers, and report when all behind it are done."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from laminar.errors import LaminarError
from laminar.weights.chain import Member, Plan, chunk_bytes
from laminar.weights.changes import Changes
from laminar.weights.incoming import Source
from laminar.weights.lifeline import Lifeline
from laminar.weights.mapping import Slot
from laminar.weights.prefix import Prefix
from laminar.weights.segment import SLOT_HASHES
from laminar.weights.transport import Peer, PeerLost, Stalled, Transport
from laminar.weights.wire import Frame, Kind, Speech

__all__ = ["PROGRESS_DEADLINE", "Forwarder", "Links", "Outgoing", "Refused", "Report"]

logger = logging.getLogger(__name__)

PROGRESS_DEADLINE = 1.0
"""Seconds without a byte or a sign after which a relay counts as frozen."""

TRIES = 2
"""Connections to one relay in a row without a byte of progress, before it counts as lost."""

FED_DEADLINE = 10.0
"""Seconds that a relay without a predecessor waits for a new one before it gives its successors up."""

POLL = 0.01

RATE_BYTES = 4 << 20
"""Fewer bytes say nothing of a link's rate: they fit into the sockets' buffers."""


@dataclass(frozen=True, slots=True)
class Report:
    """Something that happened on a chain, for whoever plans it.

    ``what`` is one of ``fed`` (first bytes from a new predecessor), ``promoted`` (the version can be read),
    ``lost`` (a relay was given up), ``done`` (all behind the sender are done), ``failed`` (the
    sender cannot go on), ``starving`` (no bytes come),
    ``skipped`` (another relay has taken the sender's place), ``damaged`` (bytes were asked for again).
    """

    what: str
    version: int
    part: int
    epoch: int
    member: str = ""
    why: str = ""
    at: float = 0.0


class Refused(LaminarError):
    """A relay does not want what it is sent. ``kind`` is ``skipped``, ``overtaken``, ``busy``, ``run``,
    ``token``, ``layout`` or ``memory``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Links:
    """Connections to other relays, kept open between versions."""

    def __init__(self, transport: Transport, deadline: float, lifeline: Lifeline | None = None) -> None:
        self.transport = transport
        self.deadline = deadline
        self._lifeline = lifeline
        self._mutex = threading.Lock()
        self._idle: dict[str, Peer] = {}
        self.rate: float | None = None
        """Bytes/s at which the last whole version was sent."""

    def take(self, address: str) -> Peer:
        """The open connection if it still stands, or a new one. ``PeerLost`` if nobody answers."""
        with self._mutex:
            peer = self._idle.pop(address, None)
        if peer is not None:
            if peer.idle():
                return peer
            peer.close()
        peer = self.transport.connect(address, self.deadline)
        if self._lifeline is not None:
            self._lifeline.add(peer.socket)
        return peer

    def give(self, peer: Peer) -> None:
        """Keep a connection for the next version."""
        with self._mutex:
            other = self._idle.get(peer.address)
            self._idle[peer.address] = peer
        if other is not None:
            other.close()

    def close(self) -> None:
        """Close all that nobody uses."""
        with self._mutex:
            peers = list(self._idle.values())
            self._idle.clear()
        for peer in peers:
            peer.close()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A version on its way to the members of a plan that stand behind ``position``."""

    plan: Plan
    position: int
    run: str
    slot: Slot
    digest: str
    prefix: Prefix
    changes: Changes | None = None
    """What may be sent instead to who holds the version before."""
    token: str = ""
    """What the relays of one scheduler know each other by."""

    @property
    def source(self) -> Source:
        """Where its bytes are."""
        return Source.of(self.slot, self.prefix)

    def hello(self, to: int) -> dict[str, Any]:
        """The body of HELLO for the member at position ``to``."""
        return {
            "run": self.run,
            "token": self.token,
            "layout": self.slot.layout.hash,
            "plan": self.plan.to_dict(),
            "position": self.position,
            "to": to,
            "digest": self.digest,
            "changes": self.changes.offer() if self.changes else None,
        }

    def hashes(self) -> bytes:
        """The body of HASHES: those of the plan's range."""
        size = self.slot.layout.chunk_bytes
        first, end = self.plan.start // size, -(-self.plan.stop // size)
        hashes = self.slot.words[SLOT_HASHES + first : SLOT_HASHES + end].tolist()
        return struct.pack(f"<{len(hashes)}Q", *hashes)


class Forwarder:
    """A thread that feeds the first living member behind a position.

    A broken connection is tried once more: the other side may have closed it to ask for a damaged chunk again,
    or because another relay has taken over, which it then says. A frozen relay is not tried again. The next in
    the list is fed from what it holds. Before it passes one over, a relay that is itself not fed waits until it
    is: if it was skipped, its successors are no longer its own.
    """

    def __init__(
        self,
        links: Links,
        outgoing: Outgoing,
        *,
        fed: Callable[[], bool],
        report: Callable[[Report], None],
        sent: Callable[[int], None],
    ) -> None:
        self.outgoing = outgoing
        self.done = threading.Event()
        self._links = links
        self._fed = fed
        self._report = report
        self._sent = sent
        self._mutex = threading.Lock()
        self._cancelled = threading.Event()
        self._peer: Peer | None = None
        self._at_end = ExitStack()
        self._thread = threading.Thread(target=self._run, name="laminar-forward", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop and wait until nothing is read from the slot any more. Idempotent."""
        self._cancelled.set()
        with self._mutex:
            if self._peer is not None:
                self._peer.hang_up()
        self._thread.join(FED_DEADLINE)

    def at_end(self, stack: ExitStack) -> None:
        """Close a stack (a pin) when it has ended; at once, if it has."""
        with self._mutex:
            if not self.done.is_set():
                self._at_end.push(stack)
                return
        stack.close()

    def _run(self) -> None:
        plan = self.outgoing.plan
        try:
            for position, member in plan.behind(self.outgoing.position):
                if self._cancelled.is_set() or self._feed(position, member):
                    break
            if not self._cancelled.is_set():
                self._tell("done")
        except Refused as refusal:
            logger.info("%s", refusal)
            self._tell("skipped", why=str(refusal))
        except Exception as error:  # a thread's end: whoever plans hears of it, and plans anew
            logger.exception("sending version %d failed", plan.version)
            self._tell("failed", why=f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._mutex:
                self.done.set()
            self._at_end.close()

    def _feed(self, position: int, member: Member) -> bool:
        """Feed a member until all from it on are done. False if it is lost, and the next one is to be fed.

        Raises ``Refused`` where another relay has taken over.
        """
        tries, furthest = TRIES, -1
        while not self._cancelled.is_set():
            try:
                with self._using(self._links.take(member.address)) as peer:
                    offset, changes = self._greet(peer, position)
                    if offset > furthest:
                        tries, furthest = TRIES, offset
                    self._stream(peer, offset, changes)
                    self._await_done(peer)
                    return True
            except Refused as refusal:
                if refusal.kind == "skipped":
                    raise
                return self._lost(member, refusal)
            except (Stalled, Speech) as error:
                return self._lost(member, error)
            except PeerLost as error:
                tries -= 1
                if not tries:
                    return self._lost(member, error)
        return True

    @contextmanager
    def _using(self, peer: Peer) -> Iterator[Peer]:
        """A connection that ``cancel`` can break; kept for the next version if all went well."""
        with self._mutex:
            self._peer = peer
        try:
            if self._cancelled.is_set():
                raise PeerLost(f"{peer.address}: cancelled")
            yield peer
        except BaseException:
            peer.close()
            raise
        finally:
            with self._mutex:
                self._peer = None
        self._links.give(peer)

    def _stream(self, peer: Peer, offset: int, changes: Changes | None) -> None:
        """The version's bytes, or its changes; how fast whole versions go is noted for the next one's choice."""
        plan, deadline = self.outgoing.plan, self._links.deadline
        if changes is not None:
            chunk = chunk_bytes(changes.nbytes, len(plan.members) - 1)
            peer.send_range(changes.source, offset, chunk, deadline, self._sent)
            return
        began = time.monotonic()
        peer.send_range(self.outgoing.source, offset, plan.chunk, deadline, self._sent)
        if plan.stop - offset >= RATE_BYTES:
            self._links.rate = (plan.stop - offset) / (time.monotonic() - began)

    def _greet(self, peer: Peer, to: int) -> tuple[int, Changes | None]:
        """Offer the version; the byte from which the other side wants it, and whether it takes the changes."""
        peer.send(Kind.HELLO, self.outgoing.hello(to))
        answer = self._answer(peer, Kind.HAVE).values()
        if answer["layout"]:
            peer.send(Kind.LAYOUT, self.outgoing.slot.layout.to_json().encode())
            answer = self._answer(peer, Kind.HAVE).values()
        peer.send(Kind.HASHES, self.outgoing.hashes())
        return int(answer["offset"]), self.outgoing.changes if answer["changes"] else None

    def _await_done(self, peer: Peer) -> None:
        self._answer(peer, Kind.DONE)

    def _answer(self, peer: Peer, expected: Kind) -> Frame:
        """The next frame that is not BUSY; each of those gives it another progress deadline."""
        while True:
            frame = peer.read(self._links.deadline)
            if frame.kind is Kind.REFUSED:
                refusal = frame.values()
                raise Refused(refusal["kind"], refusal["why"])
            if frame.kind is expected:
                return frame
            if frame.kind is not Kind.BUSY:
                raise Speech(f"{peer.address} said {frame.kind.name}, expected {expected.name}")

    def _lost(self, member: Member, error: LaminarError) -> bool:
        if self._cancelled.is_set():
            return True
        self._tell("lost", member.name, str(error))
        until = time.monotonic() + FED_DEADLINE
        while not self._fed() and not self._cancelled.wait(POLL):
            if time.monotonic() > until:
                raise Refused("skipped", f"nobody has sent version {self.outgoing.plan.version} for {FED_DEADLINE:g} s")
        return False

    def _tell(self, what: str, member: str = "", why: str = "") -> None:
        plan = self.outgoing.plan
        self._report(Report(what, plan.version, plan.part, plan.epoch, member, why, time.time()))
