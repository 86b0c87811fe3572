"""A UCX listener on one interface. ``ucxx`` can only listen on all of them, so this calls UCX's own C functions.

What is used of ``ucp.h`` has a field mask in front of every structure, by which UCX 1.x keeps it as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import struct
from functools import cache

__all__ = ["UcxListening"]

SOCKADDR, CONN_HANDLER = 1 << 0, 1 << 2
"""Fields of ``ucp_listener_params_t``."""
ERR_MODE, ERR_HANDLER, CONN_REQUEST = 1 << 1, 1 << 2, 1 << 6
"""Fields of ``ucp_ep_params_t``."""
ERR_MODE_PEER = 1
FAMILY_IPV4 = 2
STORAGE = 128
"""Bytes of a ``sockaddr_storage``."""

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


@cache
def _ucp() -> ctypes.CDLL:
    """The library that ``ucxx`` has loaded."""
    ucp = ctypes.CDLL("libucp.so.0")
    handle = ctypes.c_void_p
    for name in ("ucp_listener_create", "ucp_listener_query", "ucp_ep_create"):
        getattr(ucp, name).restype = ctypes.c_int8
    ucp.ucp_listener_create.argtypes = ucp.ucp_ep_create.argtypes = (handle, handle, handle)
    ucp.ucp_listener_query.argtypes = (handle, handle)
    ucp.ucp_listener_destroy.restype, ucp.ucp_listener_destroy.argtypes = None, (handle,)
    ucp.ucs_status_string = ctypes.CDLL("libucs.so.0").ucs_status_string  # type: ignore[attr-defined]
    ucp.ucs_status_string.restype, ucp.ucs_status_string.argtypes = ctypes.c_char_p, (ctypes.c_int8,)
    return ucp


def _ignore(argument: int | None, endpoint: int | None, status: int) -> None:
    """A connection broke. Who receives sees it by the socket beside it."""


_IGNORE = _Failed(_ignore)  # as long as UCX may call it


class UcxListening:
    """Listens for a UCX worker on an address of this host, and accepts whoever connects, with error handling.

    The connections belong to the worker, and end with it; close this first.

    Parameters
    ----------
    worker
        Handle of the worker (``UCXWorker.handle``).
    host
        IPv4 address to listen on.

    Raises
    ------
    OSError
        UCX cannot listen there.
    """

    def __init__(self, worker: int, host: str) -> None:
        self._worker = worker
        address = struct.pack("=HH4s8x", FAMILY_IPV4, 0, ipaddress.IPv4Address(host).packed)
        place = ctypes.create_string_buffer(address, len(address))
        self._accept = _Accept(self._connected)  # as long as UCX may call it
        call = ctypes.cast(self._accept, ctypes.c_void_p)
        params = _ListenerParams(
            SOCKADDR | CONN_HANDLER, _Place(ctypes.addressof(place), len(address)), _Handler(), _Handler(call.value)
        )
        self._listener: ctypes.c_void_p | None = ctypes.c_void_p()
        status = _ucp().ucp_listener_create(worker, ctypes.addressof(params), ctypes.byref(self._listener))
        _check(status, f"UCX cannot listen on {host}")

    @property
    def port(self) -> int:
        """Where to connect to."""
        found = _ListenerAttributes(SOCKADDR)
        _check(_ucp().ucp_listener_query(self._listener, ctypes.addressof(found)), "UCX does not say its port")
        return int.from_bytes(ctypes.string_at(ctypes.addressof(found) + ctypes.sizeof(ctypes.c_uint64) + 2, 2), "big")

    def close(self) -> None:
        """Stop listening; connections go on. Idempotent."""
        if self._listener is not None:
            _ucp().ucp_listener_destroy(self._listener)
            self._listener = None

    def _connected(self, request: int, argument: int | None) -> None:
        """In the thread that has the worker progress."""
        failed = ctypes.cast(_IGNORE, ctypes.c_void_p)
        params = _EndpointParams(
            ERR_MODE | ERR_HANDLER | CONN_REQUEST,
            error_mode=ERR_MODE_PEER,
            error=_Handler(failed.value),
            request=request,
        )
        endpoint = ctypes.c_void_p()
        with contextlib.suppress(OSError):  # gone again already
            status = _ucp().ucp_ep_create(self._worker, ctypes.addressof(params), ctypes.byref(endpoint))
            _check(status, "UCX cannot take a connection")


def _check(status: int, what: str) -> None:
    if status:
        raise OSError(f"{what}: {_ucp().ucs_status_string(status).decode()}")
