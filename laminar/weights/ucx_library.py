"""The UCX that is installed: loaded once a process, what it can do, and what connections use one after the other."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from laminar.weights.ucx_listener import Acceptor

__all__ = [
    "Description",
    "borrow_acceptor",
    "borrow_context",
    "describe",
    "give_back_acceptor",
    "give_back_context",
    "library",
]

RDMA = ("rc", "ud", "dc", "srd", "gga")
"""Transports of UCX that bypass the kernel, by how their names begin."""


@dataclass(frozen=True, slots=True)
class Description:
    """What the UCX found here can do: its version and transports, and whether one of these is RDMA."""

    version: str
    transports: tuple[str, ...]
    rdma: bool


@cache
def library() -> tuple[Any, Any]:
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


_mutex = threading.Lock()
_free: dict[tuple[bool, str | None], list[Any]] = {}
"""Contexts and acceptors that nobody uses, by whether for loopback, and by where an acceptor listens."""


def borrow_context(loopback: bool) -> Any:
    """A UCX context that no other thread uses until it is given back: it caches what memory it knows, unlocked.

    (UCX locks a context that was made for several threads, and ucxx cannot ask for that. A new one takes
    milliseconds, more with RDMA devices.) A process that listens on loopback opens no other interface by UCX either.
    """
    return _borrow((loopback, None)) or _new_context(loopback)


def give_back_context(loopback: bool, context: Any) -> None:
    """Its workers are gone."""
    _give_back((loopback, None), context)


def borrow_acceptor(loopback: bool, host: str) -> Acceptor:
    """What accepts connections at an address of this host, with a context of its own; for one receiver."""
    found: Acceptor | None = _borrow((loopback, host))
    if found is None:
        core, _ = library()
        context = _new_context(loopback)
        found = Acceptor(context, core.UCXWorker(context), host)
    return found


def give_back_acceptor(loopback: bool, host: str, acceptor: Acceptor) -> None:
    """It is closed."""
    _give_back((loopback, host), acceptor)


def _borrow(key: tuple[bool, str | None]) -> Any:
    with _mutex:
        free = _free.get(key)
        return free.pop() if free else None


def _give_back(key: tuple[bool, str | None], it: Any) -> None:
    with _mutex:
        _free.setdefault(key, []).append(it)


def _new_context(loopback: bool) -> Any:
    core, _ = library()
    settings = {"RNDV_SCHEME": os.environ.get("UCX_RNDV_SCHEME", "put_zcopy")}
    settings |= {"TCP_RX_SEG_SIZE": "64k", "TCP_TX_SEG_SIZE": "64k"}  # the usual 8k cost a twentieth more CPU
    if loopback:
        settings |= {"TLS": "tcp", "NET_DEVICES": "lo"}
    return core.UCXContext(settings, feature_flags=(core.Feature.TAG, core.Feature.WAKEUP))


def describe() -> Description:
    """What the UCX found here can do."""
    core, _ = library()
    context = borrow_context(False)
    found = sorted(set(re.findall(r"-- *(\w+)/", context.info)))
    give_back_context(False, context)
    rdma = any(name.startswith(RDMA) for name in found)
    return Description(".".join(map(str, core.get_ucx_version())), tuple(found), rdma)
