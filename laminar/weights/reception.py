"""One range of a version as one relay sees it, and how its bytes get in: whole, or as changes."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from laminar.errors import LaminarError
from laminar.weights.chain import Fence, Plan, chunk_bytes
from laminar.weights.changes import Changes, changes_between
from laminar.weights.forward import PROGRESS_DEADLINE, Forwarder, Refused
from laminar.weights.incoming import Damaged, Incoming, Range
from laminar.weights.layout import Layout
from laminar.weights.mapping import Slot
from laminar.weights.owner import SegmentOwner
from laminar.weights.prefix import Prefix
from laminar.weights.transport import Peer, PeerLost
from laminar.weights.wire import Kind

__all__ = [
    "FRAME_DEADLINE",
    "Key",
    "NodeStatus",
    "Reception",
    "agree",
    "busy",
    "changes_to_send",
    "receive_changes",
    "receive_whole",
    "wanted_changes",
]

logger = logging.getLogger(__name__)

FRAME_DEADLINE = 5.0
"""Seconds between two frames that follow each other."""

Key = tuple[int, int]
"""Version and part."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a relay's data plane did so far. ``position`` is that in the newest plan seen (0: it sent first);
    ``receiving`` the version that is coming in and the bytes of it that are there."""

    bytes_in: int
    bytes_out: int
    position: int | None
    repairs: int
    receiving: tuple[int, int] | None


@dataclass
class Reception:
    """One range of a version as this relay sees it: from whom it comes, how far it is, who feeds it on."""

    key: Key
    fence: Fence
    slot: Slot
    prefix: Prefix
    incoming: Incoming | None = None
    """None where the version can be read here already."""
    range: Range | None = None
    peer: Peer | None = None
    forwarder: Forwarder | None = None
    changes: Changes | None = None
    """What makes it of the version before, come in or made here."""
    whole_wanted: bool = False
    """Whether changes turned out not to fit."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that receives."""

    def fed(self) -> bool:
        """Whether there is, or need be, somebody who sends it."""
        return self.prefix.whole or self.peer is not None


Arrived = Callable[[Reception, int, bool], None]
"""Told how many bytes came, and whether they are the first of a connection."""


def agree(peer: Peer, values: dict[str, Any], owner: SegmentOwner, run: str, token: str = "") -> None:
    """Whether this is our run, our scheduler's relay, and our layout. A relay that has no layout yet takes the one
    it is sent."""
    if values["run"] != run:
        raise Refused("run", f"this relay serves run {run}, it was sent weights of run {values['run']}")
    if not hmac.compare_digest(str(values.get("token", "")).encode(), token.encode()):
        raise Refused(
            "token", f"{peer.address} does not know the token of run {run}: only relays of its own scheduler may send"
        )
    if owner.layout is None:
        peer.send(Kind.HAVE, {"offset": 0, "layout": True, "changes": False})
        frame = peer.read(FRAME_DEADLINE)
        try:
            with busy(peer):
                owner.prepare(Layout.from_json(frame.body.decode()))
        except LaminarError as error:
            raise Refused("memory", str(error)) from error
    layout = owner.layout
    if layout is None or layout.hash != values["layout"]:
        raise Refused(
            "layout",
            f"this relay holds layout {layout.hash if layout else None}, it was sent {values['layout']}: "
            "the model changed under a run; start a new one",
        )


def receive_whole(peer: Peer, reception: Reception, plan: Plan, arrived: Arrived) -> None:
    """Fill a range from where it ends.

    Raises
    ------
    Damaged
        A chunk does not match its hash; it counts as not there.
    PeerLost
        The connection is broken.
    """
    part = reception.range
    assert part is not None
    start = before = reception.prefix.have

    def count(now: int) -> None:
        nonlocal before
        arrived(reception, now - before, before == start)
        before = now
        part.arrived(now)

    peer.receive_range(reception.slot.payload, start, reception.prefix.stop, plan.chunk, count)


def receive_changes(
    peer: Peer, reception: Reception, plan: Plan, changes: Changes, owner: SegmentOwner, arrived: Arrived
) -> None:
    """Receive changes and make the version of them. Raises as ``receive_whole``: if they do not fit, the whole
    version is wanted from then on."""
    part = reception.range
    assert part is not None
    start = before = changes.prefix.have

    def count(now: int) -> None:
        nonlocal before
        arrived(reception, now - before, before == start)
        before = now
        changes.prefix.move(now)

    peer.receive_range(
        changes.payload, start, changes.nbytes, chunk_bytes(changes.nbytes, len(plan.members) - 1), count
    )
    try:
        with busy(peer), owner.pinned(changes.base) as old:
            changes.make(old, part)
    except (LaminarError, LookupError) as error:
        reception.whole_wanted, reception.changes = True, None
        raise Damaged(str(error)) from error


def wanted_changes(
    reception: Reception, plan: Plan, offer: dict[str, Any] | None, owner: SegmentOwner
) -> Changes | None:
    """The changes to receive, of those that a sender offers; None where the whole version is needed, or has begun to
    come, or is here."""
    if offer is None or reception.range is None or reception.whole_wanted or plan.parts > 1:
        return None
    if reception.prefix.have > reception.prefix.start or offer["base"] not in owner.held():
        return None
    if reception.changes is None or reception.changes.checksum != offer["checksum"]:
        try:
            reception.changes = Changes(owner.root, **offer)
        except OSError as error:
            logger.warning("no memory for changes (%s): version %d is taken whole", error.strerror, plan.version)
            reception.whole_wanted, reception.changes = True, None
    return reception.changes


def changes_to_send(plan: Plan, owner: SegmentOwner, rate: float | None) -> Changes | None:
    """What to send instead of a whole version, if that gets there sooner at ``rate`` bytes/s; None: it does not, or
    nobody knows."""
    before = max((version for version in owner.held() if version < plan.version), default=None)
    if before is None or rate is None or plan.parts > 1:
        return None
    with owner.pinned(before) as old, owner.pinned(plan.version) as new:
        try:
            return changes_between(owner.root, before, old, new, rate)
        except OSError as error:
            logger.warning("no memory for changes (%s): version %d is sent whole", error.strerror, plan.version)
            return None


@contextmanager
def busy(peer: Peer) -> Iterator[None]:
    """Tell a peer that waits for an answer, four times a second, that this process lives."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_DEADLINE / 4):
            try:
                peer.send(Kind.BUSY)
            except PeerLost:
                return

    thread = threading.Thread(target=tell, name="laminar-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(PROGRESS_DEADLINE)  # a peer that takes nothing holds it up; what follows has its own deadline
