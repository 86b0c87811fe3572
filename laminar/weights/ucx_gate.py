"""Who may connect to a UCX listener: a filter of the kernel on its socket, which UCX itself neither sets nor touches.

UCX listens for everybody, accepts at once, and is not made for strangers: one that says much keeps its thread busy for
ever, one that says something clever ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from pathlib import Path

__all__ = ["Gate"]

ATTACH_FILTER = 26
"""``SO_ATTACH_FILTER``; each child of a listening socket begins with a copy. Needs no privilege."""
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""Instructions of the kernel's classic packet filter."""
IP_SOURCE = (-0x100000 + 12) & 0xFFFFFFFF
"""Where the sender's address is, counted from the beginning of the IP header."""
WHOLE, NOTHING = 0xFFFFFFFF, 0
NOBODY = "0.0.0.0"
"""No packet comes from there."""


class Gate:
    """The gate of the socket that listens on an address of this process; shut at first.

    Where the kernel has no such filters, or UCX listens otherwise, it stands open.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = _listening(host, port)
        self.open_for(NOBODY)

    def open_for(self, host: str) -> None:
        """Let one IPv4 address connect, and no other: packets from elsewhere are dropped without an answer."""
        if self._socket is None:
            return
        program = b"".join(
            struct.pack("=HBBI", *instruction)
            for instruction in (
                (LOAD_WORD, 0, 0, IP_SOURCE),
                (JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(host))),
                (RETURN, 0, 0, WHOLE),
                (RETURN, 0, 0, NOTHING),
            )
        )
        code = ctypes.create_string_buffer(program, len(program))
        with contextlib.suppress(OSError):
            self._socket.setsockopt(
                socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", len(program) // 8, ctypes.addressof(code))
            )

    def shut(self) -> None:
        """Let nobody connect; connections that are there go on."""
        self.open_for(NOBODY)


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket of this process that listens there, by a descriptor of our own."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # gone again
            if not entry.is_socket():
                continue
            found = stack.enter_context(socket.socket(fileno=os.dup(int(entry.name))))
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[:2] == (host, port):
                stack.pop_all()
                return found
    return None
