"""What carries a version from one relay to the next. Two are known: ``tcp`` and ``ucx``.

A transport listens and connects; a connection carries frames both ways and, from the one who connected to the
one who accepted, ranges of a version. Every call has a deadline, and ends with ``PeerLost`` or ``Stalled``.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from laminar.errors import LaminarError, UserError
from laminar.weights.incoming import Source
from laminar.weights.wire import Frame, Kind

__all__ = [
    "Choice",
    "Listener",
    "Peer",
    "PeerLost",
    "Stalled",
    "Transport",
    "choose",
    "installed",
    "open_transport",
    "split_address",
]

NAMES = ("tcp", "ucx")
SYNONYMS = ("ucx-py", "ucp", "ucxx")
"""Other names by which users know ``ucx``."""


class PeerLost(LaminarError):
    """The connection is broken: the other process died, or it closed the connection."""


class Stalled(PeerLost):
    """The connection stands, but nothing moved for the progress deadline: the other process is frozen."""


class Peer(Protocol):
    """One connection, used by one thread; another may send frames meanwhile, or ``hang_up``."""

    address: str

    @property
    def socket(self) -> socket.socket:
        """The TCP connection that frames go over: shut down, the peer is lost."""

    def send(self, kind: Kind, body: bytes | dict[str, Any] = b"") -> None:
        """Send a frame."""

    def read(self, deadline: float | None) -> Frame:
        """The next frame, within ``deadline`` seconds (None: whenever it comes)."""

    def send_range(self, source: Source, start: int, chunk: int, deadline: float, sent: Callable[[int], None]) -> None:
        """Send a source's bytes from ``start`` to its end as they come in, at most ``chunk`` at a time; ``sent``
        is told each time how many."""

    def receive_range(
        self, into: memoryview, start: int, stop: int, chunk: int, arrived: Callable[[int], None]
    ) -> None:
        """Fill a buffer's bytes ``start`` to ``stop`` and call ``arrived`` with how far it is, chunk for chunk."""

    def idle(self) -> bool:
        """Whether the connection stands and nothing was said: it can be used again."""

    def hang_up(self) -> None:
        """Break the connection, from any thread: whoever uses it gets ``PeerLost``. Idempotent."""

    def close(self) -> None:
        """End it; for the thread that uses it. Idempotent."""


class Listener(Protocol):
    """Waits for connections."""

    address: str

    @property
    def socket(self) -> socket.socket:
        """The listening socket."""

    def accept(self) -> Peer:
        """The next connection. ``PeerLost`` once the listener is closed."""

    def close(self) -> None:
        """Stop. Idempotent."""


class Transport(Protocol):
    """A way to send bytes."""

    name: str

    def listen(self, host: str, port: int = 0) -> Listener:
        """Listen on a host's interface. ``LaminarError`` if the port is taken."""

    def connect(self, address: str, deadline: float) -> Peer:
        """Connect within ``deadline`` seconds, or raise ``PeerLost``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which transport is used, and why."""

    name: str
    why: str


def installed() -> list[str]:
    """The transports that can be used here.

    Example
    -------
    >>> installed()[0]
    'tcp'
    """
    return ["tcp", *(["ucx"] if _found("ucxx") else [])]


def choose(wanted: str = "") -> Choice:
    """The transport to use: the one asked for (here or by the variable ``LAMINAR_TRANSPORT``), else ``ucx`` where its
    UCX has RDMA, else ``tcp``.

    (UCX over TCP costs more CPU than sockets and ``sendfile``: without RDMA nothing speaks for it.) ``ucx`` is
    carried by ``ucxx``; by the name ``ucx-py``, its archived predecessor, it is accepted, and the reason says so.

    Raises
    ------
    UserError
        It is unknown, or not installed.
    """
    asked = wanted or os.environ.get("LAMINAR_TRANSPORT", "")
    wanted = "ucx" if asked in SYNONYMS else asked
    if wanted and wanted not in NAMES:
        raise UserError(f"there is no transport `{wanted}`; there are: {', '.join(NAMES)}")
    archived = "ucx-py, its predecessor, is here but archived and not used" if _found("ucp") else ""
    if "ucx" not in installed():
        missing = "; ".join(filter(None, ["ucxx is not installed", archived]))
        if wanted == "ucx":
            raise UserError(f"transport `{asked}`: {missing}: pip install 'laminar-flow[ucx]', or use tcp")
        return Choice("tcp", missing if not wanted else "asked for")
    from laminar.weights.ucx_library import describe

    try:
        ucx = describe()
    except (ImportError, OSError) as error:
        if wanted == "ucx":
            raise UserError(f"transport `{asked}`: ucxx is here but does not load: {error}; use tcp") from error
        return Choice("tcp", f"ucxx is here but does not load: {error}" if not wanted else "asked for")
    rdma = "" if ucx.rdma else ", no RDMA"
    what = "; ".join(filter(None, [f"UCX {ucx.version} has {', '.join(ucx.transports)}{rdma}", archived]))
    if wanted:
        return Choice(wanted, f"asked for; {what}")
    if ucx.rdma:
        return Choice("ucx", what)
    return Choice("tcp", f"{what}: without it sockets are faster")


def open_transport(name: str) -> Transport:
    """A transport by its name."""
    if name == "ucx":
        from laminar.weights.ucx import Ucx

        return Ucx()
    from laminar.weights.tcp import Tcp

    return Tcp()


def split_address(address: str) -> tuple[str, str, int]:
    """Transport, host and port.

    Example
    -------
    >>> split_address("tcp://127.0.0.1:4711")
    ('tcp', '127.0.0.1', 4711)
    """
    name, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if name not in NAMES or not host or not port.isdecimal():
        raise ValueError(f"{address!r} is no relay's address, expected one like tcp://127.0.0.1:4711")
    return name, host, int(port)


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
