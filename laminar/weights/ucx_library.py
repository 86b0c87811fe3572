"""The UCX that is installed: loaded once a process, what it can do, and what all connections of the process share."""

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

__all__ = ["Description", "acceptor", "context", "describe", "library"]

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


_mutex = threading.RLock()
_acceptors: dict[tuple[bool, str], Acceptor] = {}


def context(loopback: bool) -> Any:
    """One UCX context a process. A process that listens on loopback opens no other interface by UCX either."""
    with _mutex:
        return _context(loopback)


@cache
def _context(loopback: bool) -> Any:
    core, _ = library()
    settings = {"RNDV_SCHEME": os.environ.get("UCX_RNDV_SCHEME", "put_zcopy")}
    settings |= {"TCP_RX_SEG_SIZE": "64k", "TCP_TX_SEG_SIZE": "64k"}  # the usual 8k cost a twentieth more CPU
    if loopback:
        settings |= {"TLS": "tcp", "NET_DEVICES": "lo"}
    return core.UCXContext(settings, feature_flags=(core.Feature.TAG, core.Feature.WAKEUP))


def acceptor(loopback: bool, host: str) -> Acceptor:
    """One a process for each address that it listens on."""
    core, _ = library()
    with _mutex:
        found = _acceptors.get((loopback, host))
        if found is None:
            found = _acceptors[loopback, host] = Acceptor(core.UCXWorker(context(loopback)), host)
        return found


def describe() -> Description:
    """What the UCX found here can do."""
    core, _ = library()
    found = sorted(set(re.findall(r"-- *(\w+)/", context(False).info)))
    rdma = any(name.startswith(RDMA) for name in found)
    return Description(".".join(map(str, core.get_ucx_version())), tuple(found), rdma)
