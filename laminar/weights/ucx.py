"""The transport over UCX, by ``ucxx``: for RDMA, where the system's UCX has it.

Frames go over a TCP connection as with ``tcp``; it also says where the receiver's UCX worker listens. Only
the bytes of a version go over UCX: tagged messages of its synchronous core, a few in flight. Each connection has
a UCX worker of its own on both sides, driven by the thread that uses the connection, so that a connection that
breaks takes no other with it: posted receives of a dead peer hang for ever unless they are cancelled, and UCX can
cancel only all requests of a worker at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from laminar.weights.incoming import Source
from laminar.weights.tcp import SLICES, Tcp, TcpListener, TcpPeer
from laminar.weights.transport import PeerLost, Stalled, split_address
from laminar.weights.ucx_listener import Acceptor, Loan
from laminar.weights.wire import Kind

__all__ = ["Description", "Ucx", "describe"]

WINDOW = 4
"""Messages in flight."""
PAUSE = 0.001
"""Longest wait for UCX's event descriptor, in seconds: with longer ones wake-ups are missed."""
LOOK = 16
"""Rounds with work for UCX in a row of which one looks at other descriptors too."""
CONNECT_DEADLINE = 5.0
"""Seconds for each half of making a connection, at least: the receiver's address, and the first message. UCX works out
its protocols anew for each, on both sides: 40 ms on an idle core, a second on a busy machine."""
RDMA = ("rc", "ud", "dc", "srd", "gga")
"""Transports of UCX that bypass the kernel, by how their names begin."""


@dataclass(frozen=True, slots=True)
class Description:
    """What the UCX found here can do: its version and transports, and whether one of these is RDMA."""

    version: str
    transports: tuple[str, ...]
    rdma: bool


@cache
def _library() -> tuple[Any, Any]:
    """ucxx's synchronous core and its array type. It loads libucx by itself only where librmm is there too."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    if importlib.util.find_spec("librmm") is None:
        import libucx
        import libucxx.load

        libucx.load_library()
        libucxx.load._load_wheel_installation("libucxx.so")
    else:
        import libucxx

        libucxx.load_library()
    logging.getLogger("ucx").setLevel(logging.WARNING)
    import ucxx._lib.libucxx as core
    from ucxx._lib.arr import Array

    return core, Array


@cache
def _context(loopback: bool) -> Any:
    """One UCX context a process. A process that listens on loopback opens no other interface by UCX either."""
    core, _ = _library()
    settings = {"RNDV_SCHEME": os.environ.get("UCX_RNDV_SCHEME", "put_zcopy")}
    settings |= {"TCP_RX_SEG_SIZE": "64k", "TCP_TX_SEG_SIZE": "64k"}  # the usual 8k cost a twentieth more CPU
    if loopback:
        settings |= {"TLS": "tcp", "NET_DEVICES": "lo"}
    return core.UCXContext(settings, feature_flags=(core.Feature.TAG, core.Feature.WAKEUP))


_acceptors: dict[tuple[bool, str], Acceptor] = {}
_mutex = threading.Lock()


def _acceptor(loopback: bool, host: str) -> Acceptor:
    """One a process for each address that it listens on."""
    core, _ = _library()
    with _mutex:
        found = _acceptors.get((loopback, host))
        if found is None:
            found = _acceptors[loopback, host] = Acceptor(core.UCXWorker(_context(loopback)), host)
        return found


def describe() -> Description:
    """What the UCX found here can do."""
    core, _ = _library()
    found = sorted(set(re.findall(r"-- *(\w+)/", _context(False).info)))
    rdma = any(name.startswith(RDMA) for name in found)
    return Description(".".join(map(str, core.get_ucx_version())), tuple(found), rdma)


class _Bulk:
    """A UCX worker with one endpoint: the sender's, to ``peer``, or the one that a receiver gets.

    (Endpoints made from a worker's address would save the listener, but with error handling they have no
    rendezvous, and every byte is copied twice.) The listener goes back with the first message. Whoever else connects
    before does not know the tag, which is told on the connection beside this one.

    Parameters
    ----------
    listen
        The address of this host that the sender will connect to, and the sender's; None for a sender.
    """

    def __init__(self, loopback: bool, *, listen: tuple[str, str] | None = None) -> None:
        self._core, self._array = _library()
        self._worker = self._core.UCXWorker(_context(loopback))
        self._worker.init_blocking_progress_mode()
        self._requests: deque[tuple[int, Any]] = deque()
        self.descriptor = int(self._worker.epoll_file_descriptor)
        self.closed = False
        self._busy = 0
        self._endpoint: Any = None
        self._loan: Loan | None = None
        if listen is not None:
            here, there = listen
            self._loan = _acceptor(loopback, here).lend(self._worker.handle, there)
        self.tag = secrets.randbits(64)

    def connect(self, host: str, port: int, tag: int) -> None:
        """Make this the sender, to a receiver's listener."""
        self.tag = tag
        self._endpoint = self._core.UCXEndpoint.create(self._worker, host, port, True)
        self._endpoint.set_close_callback(self._on_close)

    @property
    def port(self) -> int:
        """Where a sender reaches this worker."""
        assert self._loan is not None
        return self._loan.port

    @property
    def in_flight(self) -> int:
        """Messages posted and not completed."""
        return len(self._requests)

    def post(self, view: memoryview, offset: int) -> None:
        """Post a message; ``offset`` is told when it is complete."""
        data = self._array(view)
        post = self._worker.tag_recv if self._endpoint is None else self._endpoint.tag_send
        self._requests.append((offset, post(data, self._core.UCXXTag(self.tag))))

    def completed(self) -> Iterator[int]:
        """The offsets of the messages that are complete, in the order in which they were posted."""
        while self._requests and self._requests[0][1].completed:
            offset, request = self._requests.popleft()
            request.check_error()
            if self._loan is not None:
                self._loan.give_back()
            yield offset

    def progress(self, poller: select.poll) -> dict[int, int]:
        """Let UCX work; if it has nothing to do, wait a moment for any descriptor of the poller."""
        worked = self._loan is not None and self._loan.progress()
        while self._worker.progress_once():
            worked = True
        self._busy = self._busy + 1 if worked else 0
        if self._busy % LOOK:
            return {}
        idle = not worked and self._worker.arm()
        return dict(poller.poll(PAUSE * 1000 if idle else 0))

    def cancel(self) -> None:
        """Take back what was posted and let the UCX worker go: the memory belongs to the caller again."""
        self.closed = True
        if self._requests:
            self._worker.cancel_inflight_requests()
            self._worker.progress()
            self._requests.clear()
        if self._loan is not None:
            self._loan.close()
            self._worker.progress()
            self._loan = None
        self._endpoint = self._worker = None

    def _on_close(self) -> None:
        self.closed = True


class UcxPeer(TcpPeer):
    """A connection: frames by TCP, ranges by UCX."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        super().__init__(sock, address)
        self._loopback = sock.getpeername()[0].startswith("127.")
        self._bulk: _Bulk | None = None

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
        """Fill a buffer's bytes ``start`` to ``stop``, as ``TcpPeer``: a few messages are always posted."""
        bulk = self._receiver()
        posted = done = start
        with self._broken(bulk):
            poller = self._poller(bulk)
            while done < stop:
                while bulk.in_flight < WINDOW and posted < stop:
                    end = min(stop, posted + chunk)
                    bulk.post(into[posted:end], end)
                    posted = end
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

    def _sender(self) -> _Bulk:
        if self._bulk is None:
            frame = self.read(CONNECT_DEADLINE)
            if frame.kind is not Kind.ADDRESS:
                raise PeerLost(f"{self.address} sent {frame.kind.name}, expected the address of its UCX worker")
            _, host, _ = split_address(self.address)
            where = frame.values()
            with self._errors():
                self._bulk = _Bulk(self._loopback)
                self._bulk.connect(host, int(where["port"]), int(where["tag"]))
        return self._bulk

    def _receiver(self) -> _Bulk:
        if self._bulk is None:
            with self._errors():
                listen = self._sock.getsockname()[0], self._sock.getpeername()[0]
                self._bulk = _Bulk(self._loopback, listen=listen)
                where = {"port": self._bulk.port, "tag": self._bulk.tag}
            self.send(Kind.ADDRESS, where)
        return self._bulk

    def _poller(self, bulk: _Bulk, *others: int) -> select.poll:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN | select.POLLRDHUP)
        for descriptor in (bulk.descriptor, *others):
            poller.register(descriptor, select.POLLIN)
        return poller

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        core, _ = _library()
        try:
            yield
        except (OSError, ValueError, core.UCXError) as error:  # ValueError: the socket was closed under the poll
            raise PeerLost(f"{self.address} is lost: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _broken(self, bulk: _Bulk) -> Iterator[None]:
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
        _library()  # a second or two, which no transfer should wait for
