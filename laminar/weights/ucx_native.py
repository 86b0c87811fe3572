"""What ``ucxx`` does not wrap of UCX: its own C functions to listen on one interface only, and to accept.

What is used of ``ucp.h`` has a field mask in front of every structure, by which UCX 1.x keeps it as it is.
"""

from __future__ import annotations

import ctypes
import ipaddress
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["accept", "close", "listen", "port_of"]

SOCKADDR, CONN_HANDLER = 1 << 0, 1 << 2
"""Fields of ``ucp_listener_params_t``."""
ERR_MODE, ERR_HANDLER, CONN_REQUEST = 1 << 1, 1 << 2, 1 << 6
"""Fields of ``ucp_ep_params_t``."""
ERR_MODE_PEER = 1
FLAGS = 1 << 4
"""Field of ``ucp_request_param_t``."""
CLOSE_FORCE = 1 << 0
FAMILY_IPV4 = 2
STORAGE = 128
"""Bytes of a ``sockaddr_storage``."""
STATUS_FIRST = -100
"""The lowest error status: what a function returns instead of a pointer lies between it and 0."""

_Accept = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_Failed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int8)


class _Place(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_uint32))


class _Handler(ctypes.Structure):
    _fields_ = (("call", ctypes.c_void_p), ("argument", ctypes.c_void_p))


class _ListenerParams(ctypes.Structure):
    _fields_ = (("mask", ctypes.c_uint64), ("place", _Place), ("accept", _Handler), ("request", _Handler))


class _ListenerAttributes(ctypes.Structure):
    _fields_ = (("mask", ctypes.c_uint64), ("place", ctypes.c_char * STORAGE))


class _EndpointParams(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("error_mode", ctypes.c_int),
        ("error", _Handler),
        ("user_data", ctypes.c_void_p),
        ("flags", ctypes.c_uint),
        ("place", _Place),
        ("request", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("local", _Place),
    )


class _RequestParams(ctypes.Structure):
    _fields_ = (("mask", ctypes.c_uint32), ("flags", ctypes.c_uint32))


@cache
def _ucp() -> ctypes.CDLL:
    """The library that ``ucxx`` has loaded."""
    ucp = ctypes.CDLL("libucp.so.0")
    handle = ctypes.c_void_p
    for name in ("ucp_listener_create", "ucp_listener_query", "ucp_ep_create"):
        getattr(ucp, name).restype = ctypes.c_int8
    ucp.ucp_listener_create.argtypes = ucp.ucp_ep_create.argtypes = (handle, handle, handle)
    ucp.ucp_listener_query.argtypes = (handle, handle)
    ucp.ucp_ep_close_nbx.restype, ucp.ucp_ep_close_nbx.argtypes = ctypes.c_ssize_t, (handle, handle)
    ucp.ucp_request_free.restype, ucp.ucp_request_free.argtypes = None, (handle,)
    ucp.ucs_status_string = ctypes.CDLL("libucs.so.0").ucs_status_string  # type: ignore[attr-defined]
    ucp.ucs_status_string.restype, ucp.ucs_status_string.argtypes = ctypes.c_char_p, (ctypes.c_int8,)
    return ucp


def listen(worker: int, host: str, connected: Callable[[int], None]) -> tuple[int, Any]:
    """Have a UCX worker listen on an IPv4 address of this host.

    ``connected`` is called with every connection request, by the thread that has the worker progress.

    Returns
    -------
    tuple
        The listener's handle, and what must live as long as the listener.

    Raises
    ------
    OSError
        UCX cannot listen there.
    """
    address = struct.pack("=HH4s8x", FAMILY_IPV4, 0, ipaddress.IPv4Address(host).packed)
    place = ctypes.create_string_buffer(address, len(address))
    handler = _Accept(lambda request, argument: connected(request))
    call = ctypes.cast(handler, ctypes.c_void_p)
    params = _ListenerParams(
        SOCKADDR | CONN_HANDLER, _Place(ctypes.addressof(place), len(address)), _Handler(), _Handler(call.value)
    )
    listener = ctypes.c_void_p()
    status = _ucp().ucp_listener_create(worker, ctypes.addressof(params), ctypes.byref(listener))
    _check(status, f"UCX cannot listen on {host}")
    assert listener.value is not None
    return listener.value, handler


def port_of(listener: int) -> int:
    """Where a listener is reached. ``OSError`` if UCX does not say."""
    found = _ListenerAttributes(SOCKADDR)
    _check(_ucp().ucp_listener_query(listener, ctypes.addressof(found)), "UCX does not say its port")
    return int.from_bytes(ctypes.string_at(ctypes.addressof(found) + ctypes.sizeof(ctypes.c_uint64) + 2, 2), "big")


def accept(request: int, worker: int) -> int:
    """Make a connection request an endpoint of a worker (any of the listener's context), with error handling.
    ``OSError`` if whoever asked is gone."""
    failed = ctypes.cast(_IGNORE, ctypes.c_void_p)
    params = _EndpointParams(
        ERR_MODE | ERR_HANDLER | CONN_REQUEST, error_mode=ERR_MODE_PEER, error=_Handler(failed.value), request=request
    )
    endpoint = ctypes.c_void_p()
    status = _ucp().ucp_ep_create(worker, ctypes.addressof(params), ctypes.byref(endpoint))
    _check(status, "UCX cannot take a connection")
    assert endpoint.value is not None
    return endpoint.value


def close(endpoint: int) -> None:
    """Close an endpoint at once, whatever it still carries. It is gone when its worker has progressed."""
    params = _RequestParams(FLAGS, CLOSE_FORCE)
    pending = _ucp().ucp_ep_close_nbx(endpoint, ctypes.addressof(params))
    if not STATUS_FIRST <= pending <= 0:
        _ucp().ucp_request_free(pending)


def _ignore(argument: int | None, endpoint: int | None, status: int) -> None:
    """A connection broke. Who receives sees it by the socket beside it."""


_IGNORE = _Failed(_ignore)  # as long as UCX may call it


def _check(status: int, what: str) -> None:
    if status:
        raise OSError(f"{what}: {_ucp().ucs_status_string(status).decode()}")
