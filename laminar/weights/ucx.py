"""The transport over UCX, by ``ucxx``: for RDMA, where the system's UCX has it.

Frames go over a TCP connection as with ``tcp``; it also says where the receiver's UCX worker listens. Only
the bytes of a version go over UCX: tagged messages of its synchronous core, a few in flight. Each connection has
a UCX worker of its own on both sides, driven by the thread that uses the connection, so that a connection that
breaks takes no other with it: posted receives of a dead peer hang for ever unless they are cancelled, and UCX can
cancel only all requests of a worker at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator

from laminar.weights.incoming import Source
from laminar.weights.tcp import SLICES, Tcp, TcpListener, TcpPeer
from laminar.weights.transport import PeerLost, Stalled, split_address
from laminar.weights.ucx_bulk import Bulk
from laminar.weights.ucx_library import library
from laminar.weights.wire import Kind

__all__ = ["Ucx"]

WINDOW = 4
"""Messages in flight."""
POSTED = 32
"""Messages that a receiver waits for: posted together whenever fewer than ``WINDOW`` are left. By itself each costs ten
times as much, for a core that copies megabytes has none of this code in its caches."""
CONNECT_DEADLINE = 5.0
"""Seconds for each half of making a connection, at least: the receiver's address, and the first message. UCX works out
its protocols anew for each, on both sides: 40 ms on an idle core, a second on a busy machine."""


class UcxPeer(TcpPeer):
    """A connection: frames by TCP, ranges by UCX."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        super().__init__(sock, address)
        self._loopback = sock.getpeername()[0].startswith("127.")
        self._bulk: Bulk | None = None

    def send_range(self, source: Source, start: int, chunk: int, deadline: float, sent: Callable[[int], None]) -> None:
        """Send a source's bytes from ``start`` to its end as they come in. Raises as ``TcpPeer``."""
        new = self._bulk is None
        bulk = self._sender()
        prefix, posted, done = source.prefix, start, start
        silence = _Silence(deadline, first=max(deadline, CONNECT_DEADLINE) if new else deadline)
        with prefix.watch() as more, self._broken(bulk):
            poller = self._poller(bulk, more)
            while done < prefix.stop:
                while bulk.in_flight < WINDOW and posted < prefix.stop:
                    end = min(prefix.stop, posted + chunk)
                    if prefix.have < end:
                        break
                    bulk.post(source.payload[posted:end], end)
                    posted = end
                for end in bulk.completed():
                    sent(end - done)
                    done = end
                    silence.broken()
                if done >= prefix.stop:
                    break
                ready = bulk.progress(poller)
                if more in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(more)
                if bulk.closed or (self._sock.fileno() in ready and self._gone()):
                    raise PeerLost(f"{self.address} closed the connection")
                if bulk.in_flight and silence.too_long():
                    raise Stalled(f"{self.address} took nothing for {silence.deadline:g} s")

    def receive_range(
        self, into: memoryview, start: int, stop: int, chunk: int, arrived: Callable[[int], None]
    ) -> None:
        """Fill a buffer's bytes ``start`` to ``stop``, as ``TcpPeer``: some messages are always posted."""
        bulk = self._receiver()
        posted = done = start
        with self._broken(bulk):
            poller = self._poller(bulk)
            while done < stop:
                room = POSTED - bulk.in_flight if bulk.in_flight < WINDOW else 0
                for begin in range(posted, min(stop, posted + room * chunk), chunk):
                    posted = min(stop, begin + chunk)
                    bulk.post(into[begin:posted], posted)
                for done in bulk.completed():
                    arrived(done)
                if done < stop and self._sock.fileno() in bulk.progress(poller) and self._gone():
                    raise PeerLost(f"{self.address} closed the connection")

    def close(self) -> None:
        """End it; for the thread that uses it. Idempotent."""
        if self._bulk is not None:
            self._bulk.cancel()
            self._bulk = None
        super().close()

    def _gone(self) -> bool:
        """Whether a readable socket says that the peer hung up. (DONE may arrive before UCX says that all is sent.)"""
        return not self._sock.recv(1, socket.MSG_PEEK)

    def _sender(self) -> Bulk:
        if self._bulk is None:
            frame = self.read(CONNECT_DEADLINE)
            if frame.kind is not Kind.ADDRESS:
                raise PeerLost(f"{self.address} sent {frame.kind.name}, expected the address of its UCX worker")
            _, host, _ = split_address(self.address)
            where = frame.values()
            with self._errors():
                self._bulk = Bulk(self._loopback)
                self._bulk.connect(host, int(where["port"]), int(where["tag"]))
        return self._bulk

    def _receiver(self) -> Bulk:
        if self._bulk is None:
            with self._errors():
                listen = self._sock.getsockname()[0], self._sock.getpeername()[0]
                self._bulk = Bulk(self._loopback, listen=listen)
                where = {"port": self._bulk.port, "tag": self._bulk.tag}
            self.send(Kind.ADDRESS, where)
        return self._bulk

    def _poller(self, bulk: Bulk, *others: int) -> select.poll:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN | select.POLLRDHUP)
        for descriptor in (bulk.descriptor, *others):
            poller.register(descriptor, select.POLLIN)
        return poller

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        core, _ = library()
        try:
            yield
        except (OSError, ValueError, core.UCXError) as error:  # ValueError: the socket was closed under the poll
            raise PeerLost(f"{self.address} is lost: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _broken(self, bulk: Bulk) -> Iterator[None]:
        """Whatever goes wrong, nothing of ours stays posted: UCX would write into memory that is used again."""
        try:
            with self._errors():
                yield
        except BaseException:
            bulk.cancel()
            self._bulk = None
            raise


class _Silence:
    """Counts slices of a deadline in which nothing happened, as ``tcp.SLICES`` says; ``first`` is the deadline of what
    happens first."""

    def __init__(self, deadline: float, *, first: float) -> None:
        self._deadline = deadline
        self._begin(first)

    def broken(self) -> None:
        """Something happened."""
        self._begin(self._deadline)

    def _begin(self, deadline: float) -> None:
        self.deadline = deadline
        self._slice = deadline / SLICES
        self._slices, self._next = 0, time.monotonic() + self._slice

    def too_long(self) -> bool:
        """Whether the deadline has passed in silence."""
        now = time.monotonic()
        if now >= self._next:
            self._slices, self._next = self._slices + 1, now + self._slice
        return self._slices >= SLICES


class UcxListener(TcpListener):
    """A listening socket."""

    peer_class = UcxPeer


class Ucx(Tcp):
    """The transport."""

    name = "ucx"
    listener_class = UcxListener

    def __init__(self) -> None:
        library()  # a second or two, which no transfer should wait for
