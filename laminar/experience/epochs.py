"""Who owns a table: each owner claims an epoch, and one that finds a later claim than its own writes no more.

A claim is a file ``epochs/<number>-<token>``. Claims have a total order, so that of two owners that claim at the
same time one has the later. An owner looks for later claims before each write, and after it before it acknowledges it.
A new owner claims before it lists the files. So whatever the old one acknowledged is in the list, and what it writes
later it finds out to be void.
"""

from __future__ import annotations

import os
import socket
import uuid

import pyarrow as pa

from laminar.errors import LaminarError
from laminar.experience.store import Store, StoreError

__all__ = ["Epoch"]

_FOLDER = "epochs"


class Epoch:
    """The claim of one owner.

    Raises
    ------
    LaminarError
        Another owner claimed at the same time, and its claim is the later.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        earlier = store.names(_FOLDER)
        last = max((int(name.partition("-")[0]) for name in earlier), default=0)
        self.name = f"{last + 1:06d}-{uuid.uuid4().hex[:8]}"
        who = f"{socket.gethostname()} process {os.getpid()}\n".encode()
        store.write(f"{_FOLDER}/{self.name}", pa.py_buffer(who))
        self.check()
        store.delete(f"{_FOLDER}/{name}" for name in earlier)

    def check(self) -> None:
        """Raise LaminarError if there is a later owner, which has all that was acknowledged, or the store is gone."""
        claims = self._store.names(_FOLDER)
        if (newest := max(claims, default="")) > self.name:
            who = self._store.read(f"{_FOLDER}/{newest}").to_pybytes().decode().strip()
            raise LaminarError(
                f"{self._store.url} has a new owner ({who}), which has all that was acknowledged; this one has lost it"
            )
        if self.name not in claims:
            raise StoreError(f"{self._store.url} has vanished: bring it back and resume")
