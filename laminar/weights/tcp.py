"""The transport over sockets: ``sendfile`` out of the segment, ``recv_into`` the next. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from laminar.errors import LaminarError
from laminar.weights.incoming import Source
from laminar.weights.transport import PeerLost, Stalled, split_address
from laminar.weights.wire import HEADER, Frame, Kind, Speech, pack, unpack_header

__all__ = ["SLICES", "Tcp", "TcpListener", "TcpPeer", "patience"]

WRITE_DEADLINE = 5.0
"""Seconds in which a frame must have left; they are short."""

SLICES = 5
"""A progress deadline is so many waits in a row, so that a process that was itself stopped does not think, when it
wakes up, that the others stood still."""

BACKLOG = 16

PIECE = 1 << 20
"""Most bytes that are received before they are looked at: they are hashed while a core's own cache holds them."""


def patience(deadline: float) -> int:
    """Milliseconds of one of the ``SLICES``."""
    return max(1, int(deadline * 1000 / SLICES))


class TcpPeer:
    """A connected socket."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.address = address
        self._sock = sock
        self._writing = threading.Lock()
        self._tune()

    @property
    def socket(self) -> socket.socket:
        """The connected socket."""
        return self._sock

    def send(self, kind: Kind, body: bytes | dict[str, Any] = b"") -> None:
        """Send a frame."""
        data = memoryview(pack(kind, body))
        with self._writing, self._lost():
            until = time.monotonic() + WRITE_DEADLINE
            while data:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    left = until - time.monotonic()
                    if left < 0 or not _ready(self._sock, select.POLLOUT, left):
                        raise Stalled(f"{self.address} took no {kind.name} for {WRITE_DEADLINE:g} s") from None

    def read(self, deadline: float | None) -> Frame:
        """The next frame, within ``deadline`` seconds (None: whenever it comes)."""
        kind, length = unpack_header(bytes(self._exactly(HEADER.size, deadline)), self.address)
        return Frame(kind, bytes(self._exactly(length, deadline)))

    def send_range(self, source: Source, start: int, chunk: int, deadline: float, sent: Callable[[int], None]) -> None:
        """Send a source's bytes from ``start`` to its end as they come in.

        Raises
        ------
        Stalled
            The other side took nothing for ``deadline`` seconds.
        PeerLost
            It is gone, or spoke in between: it never does while it wants more.
        """
        prefix, offset, silent = source.prefix, start, 0
        with source.path.open("rb") as file, prefix.watch() as more, self._lost():
            poller = select.poll()
            poller.register(more, select.POLLIN)
            while offset < prefix.stop:
                behind = offset >= prefix.have
                wanted = 0 if behind else select.POLLOUT
                poller.register(self._sock, select.POLLIN | select.POLLRDHUP | wanted)
                ready = dict(poller.poll(patience(deadline)))
                silent = 0 if behind or ready else silent + 1
                if silent >= SLICES:
                    raise Stalled(f"{self.address} took nothing for {deadline:g} s")
                if more in ready:
                    _drain(more)
                state = ready.get(self._sock.fileno(), 0)
                if state & ~select.POLLOUT:
                    raise PeerLost(f"{self.address} closed the connection")
                if state and (count := min(chunk, prefix.have - offset)) > 0:
                    with contextlib.suppress(BlockingIOError):
                        count = os.sendfile(self._sock.fileno(), file.fileno(), source.base + offset, count)
                        offset += count
                        sent(count)

    def receive_range(
        self, into: memoryview, start: int, stop: int, chunk: int, arrived: Callable[[int], None]
    ) -> None:
        """Fill a buffer's bytes ``start`` to ``stop``; waits as long as the connection stands (whoever sends may
        itself be waiting)."""
        offset = start
        with self._lost(), self._blocking():
            while offset < stop:
                end = min(stop, offset + chunk, offset + PIECE)
                while offset < end:
                    count = self._sock.recv_into(into[offset:end], 0, socket.MSG_WAITALL)
                    if not count:
                        raise PeerLost(f"{self.address} closed the connection")
                    offset += count
                arrived(offset)

    def idle(self) -> bool:
        """Whether the connection stands and nothing was said: it can be used again."""
        try:
            return not _ready(self._sock, select.POLLIN | select.POLLRDHUP, 0)
        except (OSError, ValueError):
            return False

    def hang_up(self) -> None:
        """Break the connection, from any thread: whoever uses it gets ``PeerLost``. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it; for the thread that uses it. Idempotent."""
        self.hang_up()
        self._sock.close()

    def _tune(self) -> None:
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """One system call a chunk, instead of two whenever a little has come; ``hang_up`` ends it too."""
        self._sock.setblocking(True)
        try:
            yield
        finally:
            self._sock.setblocking(False)

    def _exactly(self, count: int, deadline: float | None) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            view = view[self._receive_into(view, deadline) :]
        return data

    def _receive_into(self, view: memoryview, deadline: float | None) -> int:
        """At least one byte. In slices, as ``SLICES`` says."""
        silent = 0
        with self._lost():
            while True:
                with contextlib.suppress(BlockingIOError):
                    if count := self._sock.recv_into(view):
                        return count
                    raise PeerLost(f"{self.address} closed the connection")
                if not _ready(self._sock, select.POLLIN, None if deadline is None else deadline / SLICES):
                    silent += 1
                    if silent >= SLICES:
                        raise Stalled(f"{self.address} said nothing for {deadline:g} s")

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the socket was closed under the poll
            raise PeerLost(f"{self.address} is lost: {error}") from error


class TcpListener:
    """A listening socket."""

    peer_class: type[TcpPeer] = TcpPeer

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        host, port = sock.getsockname()[:2]
        self.address = f"{name}://{host}:{port}"
        self._name = name

    @property
    def socket(self) -> socket.socket:
        """The listening socket."""
        return self._sock

    def accept(self) -> TcpPeer:
        """The next connection. ``PeerLost`` once the listener is closed."""
        try:
            while True:
                if not _ready(self._sock, select.POLLIN, None):
                    continue
                sock, (host, port, *_) = self._sock.accept()
                with contextlib.suppress(OSError):  # gone again already
                    return self.peer_class(sock, f"{self._name}://{host}:{port}")
        except (OSError, ValueError) as error:
            raise PeerLost(f"{self.address} is closed: {error}") from error

    def close(self) -> None:
        """Stop. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Tcp:
    """The transport."""

    name = "tcp"
    listener_class: type[TcpListener] = TcpListener

    def listen(self, host: str, port: int = 0) -> TcpListener:
        """Listen on a host's interface.

        Raises
        ------
        LaminarError
            The port is taken, or the host is not this one.
        """
        sock = socket.socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            _unpace(sock, host)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            hint = "give another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else "give another host"
            raise LaminarError(f"the relay cannot listen on {host}:{port}: {error.strerror}; {hint}") from error
        return self.listener_class(sock, self.name)

    def connect(self, address: str, deadline: float) -> TcpPeer:
        """Connect within ``deadline`` seconds, or raise ``PeerLost``."""
        name, host, port = split_address(address)
        if name != self.name:
            raise Speech(f"{address} is reached by {name}, this relay sends by {self.name}: set the same on all hosts")
        try:
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.socket())
                sock.settimeout(deadline)
                _unpace(sock, host)
                sock.connect((host, port))
                peer = self.listener_class.peer_class(sock, address)
                stack.pop_all()
                return peer
        except OSError as error:
            raise PeerLost(f"{address} cannot be reached: {error}") from error


def _unpace(sock: socket.socket, host: str) -> None:
    """Before a socket has a peer: no pacing on loopback, which is no link. (Where the system's default is BBR it costs
    a quarter more CPU, and a socket that once began with it keeps its timers.)"""
    if host.startswith("127."):
        with contextlib.suppress(OSError):  # not loaded: the system's own will do
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _ready(sock: socket.socket, events: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


def _drain(waker: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(waker)
