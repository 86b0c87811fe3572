"""Where a receiver's sender connects to: a UCX listener that is used again, not destroyed.

UCX (up to 1.21 at least) does not forget the half-open connections of a listener that it destroys: if the rest of
their handshake comes later, its own thread calls the listener back in memory that was freed. So a process keeps
each of its listeners to its end, and lends it to one receiver after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from laminar.weights.ucx_gate import Gate
from laminar.weights.ucx_native import accept, close, listen, port_of

__all__ = ["Acceptor"]


class Acceptor:
    """A UCX worker of its own that listens on one address of this host and accepts connections for another worker.

    Used by one thread at a time. What comes for nobody is closed.

    Parameters
    ----------
    context
        The UCX context, which the other worker must have too: UCX does not lock one that several threads use.
    worker
        A new ``UCXWorker`` of it. It is never destroyed.
    host
        IPv4 address to listen on.
    """

    def __init__(self, context: Any, worker: Any, host: str) -> None:
        self.context = context
        self._worker = worker
        self._strays = _Endpoints(worker.handle)
        self._owner = self._strays
        handle, self._handler = listen(worker.handle, host, lambda request: self._owner.accept(request))
        self.port = port_of(handle)
        self._gate = Gate(host, self.port)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))  # not at the interpreter's end either

    def open(self, worker: int, peer: str) -> None:
        """From now on connections become endpoints of a worker, given by its handle; one host may connect."""
        while self.progress():  # what came for nobody
            pass
        self._owner = _Endpoints(worker)
        self._gate.open_for(peer)

    def progress(self) -> bool:
        """Let connections come in; whether there was anything to do."""
        worked = bool(self._worker.progress_once())
        self._strays.close()
        return worked

    def shut(self) -> None:
        """No more connections; those that are there go on. Idempotent."""
        self._gate.shut()

    def close(self) -> None:
        """Shut, and close what came; the other worker must progress once more then. Idempotent."""
        self.shut()
        owner, self._owner = self._owner, self._strays
        owner.close()


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
