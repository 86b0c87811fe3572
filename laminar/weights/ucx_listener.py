"""UCX listeners that are lent, not destroyed.

UCX (up to 1.21 at least) does not forget the half-open connections of a listener that it destroys: if the rest of
their handshake comes later, its own thread calls the listener back in memory that was freed. So a process keeps
each of its listeners to its end, and lends one to every receiver until that one's sender is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from laminar.weights.ucx_gate import Gate
from laminar.weights.ucx_native import accept, close, listen, port_of

__all__ = ["Acceptor", "Loan"]


class Acceptor:
    """A UCX worker of its own whose listeners, on one address of this host, accept connections for other workers.

    It progresses in the threads of those who borrow, one at a time, and only while they wait for a connection. What
    comes for nobody is closed.

    Parameters
    ----------
    worker
        A new ``UCXWorker``. It is never destroyed.
    host
        IPv4 address to listen on.
    """

    def __init__(self, worker: Any, host: str) -> None:
        self._worker = worker
        self._host = host
        self._lock = threading.Lock()  # of all below; held while the worker progresses, so in _Listener.connected too
        self._free: list[_Listener] = []
        self._own = _Endpoints(worker.handle)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))  # not at the interpreter's end either

    def lend(self, worker: int, peer: str) -> Loan:
        """A listener whose connections become endpoints of a worker, given by its handle; for one host to connect to.

        Raises
        ------
        OSError
            UCX cannot listen on the address.
        """
        with self._lock:
            while self._progress():  # what came for nobody
                pass
            listener = self._free.pop() if self._free else _Listener(self._worker.handle, self._host, self._own)
            listener.owner = _Endpoints(worker)
            listener.gate.open_for(peer)
        return Loan(self, listener)

    def progress(self) -> bool:
        """Let connections come in, unless another thread is at it; whether there was anything to do."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._progress()
        finally:
            self._lock.release()

    def take_back(self, listener: _Listener) -> None:
        """For ``Loan``: no endpoint of the borrower's worker is made from now on."""
        with self._lock:
            listener.gate.shut()
            listener.owner = self._own
            self._free.append(listener)

    def _progress(self) -> bool:
        worked = bool(self._worker.progress_once())
        self._own.close()
        return worked


class Loan:
    """A listener on loan, and the endpoints that came of it."""

    def __init__(self, acceptor: Acceptor, listener: _Listener) -> None:
        self.port = listener.port
        self._acceptor: Acceptor | None = acceptor
        self._listener = listener
        self._endpoints = listener.owner

    def progress(self) -> bool:
        """Let connections come in, until the listener is given back; whether there was anything to do."""
        return self._acceptor is not None and self._acceptor.progress()

    def give_back(self) -> None:
        """No more connections; those that are there go on. Idempotent."""
        if self._acceptor is not None:
            self._acceptor.take_back(self._listener)
            self._acceptor = None

    def close(self) -> None:
        """Give back, and close what came; the worker must progress once more then. Idempotent."""
        self.give_back()
        self._endpoints.close()


class _Endpoints:
    """Endpoints that were accepted for a worker."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._handles: list[int] = []

    def accept(self, request: int) -> None:
        with contextlib.suppress(OSError):  # gone again already
            self._handles.append(accept(request, self._worker))

    def close(self) -> None:
        while self._handles:
            close(self._handles.pop())


class _Listener:
    """A listener of UCX, with whoever gets its connections now."""

    def __init__(self, worker: int, host: str, owner: _Endpoints) -> None:
        self.owner = owner
        handle, self._handler = listen(worker, host, lambda request: self.owner.accept(request))
        self.port = port_of(handle)
        self.gate = Gate(host, self.port)
