"""What relays say to each other: short frames on one TCP connection a pair, around the bytes of a version.

Sender: HELLO (run, token, plan, version, digest). Receiver: HAVE (what it holds), or REFUSED (why). Sender: LAYOUT
if asked for, HASHES, then the bytes from there on. Receiver: BUSY now and then while others behind it are not done,
DONE when they are.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from laminar.errors import LaminarError

__all__ = ["HEADER", "PROTOCOL", "Frame", "Kind", "Speech", "pack", "unpack_header"]

PROTOCOL = 2
MAGIC = b"LMNR"
HEADER = struct.Struct("<4sHHI")
LARGEST = 1 << 28
SHORT = 1 << 20
"""Bytes that a frame may have which comes from somebody who has not said yet who it is."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    HAVE = 2
    REFUSED = 3
    LAYOUT = 4
    HASHES = 5
    BUSY = 6
    DONE = 7
    ADDRESS = 8


class Speech(LaminarError):
    """The peer is no relay of ours, or one of another protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    body: bytes = b""

    def values(self) -> dict[str, Any]:
        """The body as JSON."""
        found = json.loads(self.body)
        if not isinstance(found, dict):
            raise Speech(f"a frame {self.kind.name} that holds {type(found).__name__}, expected an object")
        return found


def pack(kind: Kind, body: bytes | dict[str, Any] = b"") -> bytes:
    """A frame's bytes.

    Example
    -------
    >>> unpack_header(pack(Kind.HAVE, {"offset": 7})[: HEADER.size], "here")
    (<Kind.HAVE: 2>, 12)
    """
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return HEADER.pack(MAGIC, PROTOCOL, kind, len(data)) + data


def unpack_header(header: bytes, peer: str) -> tuple[Kind, int]:
    """Kind and length of the body of a frame.

    Raises
    ------
    Speech
        What came is no frame of this protocol. One line that names the peer.
    """
    magic, protocol, kind, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise Speech(f"{peer} is no relay: its first bytes are {header[:4]!r}, expected {MAGIC!r}")
    if protocol != PROTOCOL:
        raise Speech(
            f"relay {peer} speaks protocol {protocol}, this one {PROTOCOL}: install the same laminar-flow on all hosts"
        )
    try:
        known = Kind(kind)
    except ValueError as error:
        raise Speech(f"relay {peer} sent a frame of the unknown kind {kind}") from error
    most = LARGEST if known in (Kind.LAYOUT, Kind.HASHES) else SHORT
    if length > most:
        raise Speech(f"relay {peer} announced a frame {known.name} of {length:,} bytes, at most {most:,} are taken")
    return known, length
