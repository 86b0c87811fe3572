"""The bytes of one connection over UCX: a worker with one endpoint, and the messages that are posted on it."""

from __future__ import annotations

import secrets
import select
from collections import deque
from collections.abc import Iterator
from typing import Any

from laminar.weights.ucx_library import (
    borrow_acceptor,
    borrow_context,
    give_back_acceptor,
    give_back_context,
    library,
)
from laminar.weights.ucx_listener import Acceptor

__all__ = ["Bulk"]

PAUSE = 0.001
"""Longest wait for UCX's event descriptor, in seconds: with longer ones wake-ups are missed."""
LOOK = 16
"""Completed messages in a row after which other descriptors are looked at too."""


class Bulk:
    """A UCX worker with one endpoint: the sender's, to ``peer``, or the one that a receiver gets.

    (Endpoints made from a worker's address would save the listener, but with error handling they have no
    rendezvous, and every byte is copied twice.) The listener is shut with the first message. Whoever else connects
    before does not know the tag, which is told on the connection beside this one.

    Parameters
    ----------
    listen
        The address of this host that the sender will connect to, and the sender's; None for a sender.
    """

    def __init__(self, loopback: bool, *, listen: tuple[str, str] | None = None) -> None:
        self._core, self._array = library()
        self._loopback = loopback
        self._listen = listen
        self._acceptor: Acceptor | None = None if listen is None else borrow_acceptor(loopback, listen[0])
        self._context = borrow_context(loopback) if self._acceptor is None else self._acceptor.context
        self._worker = self._core.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._requests: deque[tuple[int, Any]] = deque()
        self.descriptor = int(self._worker.epoll_file_descriptor)
        self.closed = False
        self._in_a_row = 0
        self._endpoint: Any = None
        self._waiting = False
        if self._acceptor is not None and listen is not None:
            self._acceptor.open(self._worker.handle, listen[1])
            self._waiting = True
        self.tag = secrets.randbits(64)

    def connect(self, host: str, port: int, tag: int) -> None:
        """Make this the sender, to a receiver's listener."""
        self.tag = tag
        self._endpoint = self._core.UCXEndpoint.create(self._worker, host, port, True)
        self._endpoint.set_close_callback(self._on_close)

    @property
    def port(self) -> int:
        """Where a sender reaches this worker."""
        assert self._acceptor is not None
        return self._acceptor.port

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
            if self._waiting and self._acceptor is not None:
                self._acceptor.shut()
                self._waiting = False
            yield offset

    def progress(self, poller: select.poll) -> dict[int, int]:
        """Let UCX work; unless that completes a message, wait a moment for any descriptor of the poller."""
        accepting = self._waiting and self._acceptor is not None and self._acceptor.progress()
        self._worker.progress()
        complete = bool(self._requests) and self._requests[0][1].completed
        self._in_a_row = self._in_a_row + 1 if complete else 0
        if self._in_a_row % LOOK:
            return {}
        idle = not complete and not accepting and self._worker.arm()
        return dict(poller.poll(PAUSE * 1000 if idle else 0))

    def cancel(self) -> None:
        """Take back what was posted and let the UCX worker go: the memory belongs to the caller again."""
        self.closed = True
        if self._requests:
            self._worker.cancel_inflight_requests()
            self._worker.progress()
            self._requests.clear()
        if self._acceptor is not None:
            self._acceptor.close()
            self._worker.progress()
        self._endpoint = self._worker = None
        self._let_go()

    def _let_go(self) -> None:
        """Others may use the context, now that no worker of ours is left."""
        if self._acceptor is not None and self._listen is not None:
            give_back_acceptor(self._loopback, self._listen[0], self._acceptor)
        elif self._context is not None:
            give_back_context(self._loopback, self._context)
        self._acceptor = self._context = None

    def _on_close(self) -> None:
        self.closed = True
