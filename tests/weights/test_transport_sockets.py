"""What a transport opens: sockets of the address it was told to listen on, and no other; and who may fill a buffer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from laminar.weights.incoming import Source
from laminar.weights.prefix import Prefix
from laminar.weights.transport import Peer, PeerLost, installed, open_transport
from laminar.weights.wire import Kind

SIZE = 4 << 20
CHUNK = 1 << 20


def listening() -> set[tuple[str, str]]:
    """The sockets on which this process listens (their inodes), each with its address."""
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            opened.add(str(descriptor.readlink()))
    found = set()
    for version in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/self/net/{version}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in opened and fields[3] in ("0A", "07"):  # TCP_LISTEN, an unconnected UDP socket
                found.add((fields[9], fields[1].partition(":")[0]))
    return found


@contextmanager
def connected(name: str) -> Iterator[tuple[Peer, Peer]]:
    """A sender and a receiver in this process."""
    transport = open_transport(name)
    with ExitStack() as stack:
        listener = transport.listen("127.0.0.1")
        stack.callback(listener.close)
        sender = transport.connect(listener.address, 10)
        stack.callback(sender.close)
        receiver = listener.accept()
        stack.callback(receiver.close)
        yield sender, receiver


class Receiving:
    """A thread that receives; ends with its peer."""

    def __init__(self, receiver: Peer, size: int) -> None:
        self.buffer = memoryview(bytearray(size))
        self._failed: list[PeerLost] = []
        self._thread = threading.Thread(target=self._receive, args=(receiver,), daemon=True)
        self._thread.start()

    def _receive(self, receiver: Peer) -> None:
        try:
            receiver.receive_range(self.buffer, 0, len(self.buffer), CHUNK, lambda offset: None)
        except PeerLost as error:
            self._failed.append(error)

    def end(self) -> None:
        """Wait for it."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "the receiver does not end"

    def received(self) -> bytes:
        self.end()
        assert not self._failed, self._failed
        return bytes(self.buffer)


def source(path: Path, content: bytes) -> Source:
    path.write_bytes(content)
    return Source(path, 0, memoryview(bytearray(content)), Prefix(0, len(content), len(content)))


@pytest.mark.parametrize("name", installed())
def test_a_relay_on_loopback_listens_on_loopback_only_before_during_and_after_a_transfer(
    name: str, tmp_path: Path
) -> None:
    before = listening()
    content = os.urandom(SIZE)
    seen: list[set[tuple[str, str]]] = []
    with connected(name) as (sender, receiver):
        seen.append(listening())
        if name == "ucx":
            read = sender.read

            def look_and_read(deadline: float | None) -> Any:
                frame = read(deadline)
                seen.append(listening())  # the receiver waits for us, with its UCX listener open
                return frame

            sender.read = look_and_read  # type: ignore[method-assign]
        receiving = Receiving(receiver, SIZE)
        sender.send_range(source(tmp_path / "source", content), 0, CHUNK, 10, lambda count: seen.append(listening()))
        assert receiving.received() == content
    assert len(seen) >= 3
    assert {address for _, address in set.union(*seen) - before} == {"0100007F"}


@pytest.mark.skipif("ucx" not in installed(), reason="ucxx is not installed")
def test_a_stranger_at_the_ucx_listener_fills_nothing(tmp_path: Path) -> None:
    from laminar.weights.ucx_bulk import Bulk

    content = os.urandom(SIZE)
    with connected("ucx") as (sender, receiver):
        receiving = Receiving(receiver, SIZE)
        frame = sender.read(10)
        assert frame.kind is Kind.ADDRESS
        stranger = Bulk(True)
        stranger.connect("127.0.0.1", frame.values()["port"], tag=1)
        stranger.post(memoryview(bytearray(CHUNK)), CHUNK)
        sender.read = lambda deadline: frame  # type: ignore[method-assign]
        sender.send_range(source(tmp_path / "source", content), 0, CHUNK, 10, lambda count: None)
        assert receiving.received() == content
        stranger.cancel()
