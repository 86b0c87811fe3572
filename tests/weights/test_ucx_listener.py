"""UCX listeners are lent: strangers at their port, many connections, and the end of the process do no harm."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from laminar.weights.transport import Peer, PeerLost, installed
from laminar.weights.wire import Kind
from tests.weights.test_transport_sockets import CHUNK, Receiving, connected, source

pytestmark = pytest.mark.skipif("ucx" not in installed(), reason="ucxx is not installed")

SIZE = 64 << 10
CONTENT = bytes(range(256)) * (SIZE // 256)
DEADLINE = 10.0


@contextmanager
def waiting() -> Iterator[tuple[Peer, Receiving, int]]:
    """A sender, a receiver that waits for it, and the port at which it does so."""
    with connected("ucx") as (sender, receiver):
        receiving = Receiving(receiver, SIZE)
        frame = sender.read(DEADLINE)
        assert frame.kind is Kind.ADDRESS
        sender.read = lambda deadline: frame  # type: ignore[method-assign]
        try:
            yield sender, receiving, frame.values()["port"]
        finally:
            sender.close()
            receiving.end()


def transfer(path: Path) -> None:
    """One connection, made, used and closed."""
    with waiting() as (sender, receiving, _):
        sender.send_range(source(path / "source", CONTENT), 0, CHUNK, DEADLINE, lambda count: None)
        assert receiving.received() == CONTENT


@pytest.fixture(scope="module")
def handshake() -> bytes:
    """What UCX sends first over a new connection."""
    from laminar.weights.ucx_bulk import Bulk

    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Bulk(True)
        client.connect("127.0.0.1", server.getsockname()[1], tag=1)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(0.01)
            until = time.monotonic() + DEADLINE
            said = b""
            while not said:
                assert time.monotonic() < until, "UCX says nothing"
                client._worker.progress()
                try:
                    said = connection.recv(1 << 16)
                except TimeoutError:
                    continue
        client.cancel()
    return said


def says_nothing(stranger: socket.socket, handshake: bytes) -> bytes:
    return b""


def says_something_else(stranger: socket.socket, handshake: bytes) -> bytes:
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return b"\r\n"


def hangs_up(stranger: socket.socket, handshake: bytes) -> bytes:
    stranger.shutdown(socket.SHUT_RDWR)
    return b""


def begins(stranger: socket.socket, handshake: bytes) -> bytes:
    stranger.sendall(handshake[:-20])
    return handshake[-20:]


def was_there_before(stranger: socket.socket, handshake: bytes) -> bytes:
    stranger.sendall(handshake)
    return b""


@pytest.mark.parametrize("does", [says_nothing, says_something_else, hangs_up, begins, was_there_before])
def test_a_stranger_at_the_port_disturbs_neither_its_receiver_nor_the_next(
    does: Any, handshake: bytes, tmp_path: Path
) -> None:
    with waiting() as (sender, receiving, port), socket.create_connection(("127.0.0.1", port)) as stranger:
        rest = does(stranger, handshake)
        sender.send_range(source(tmp_path / "source", CONTENT), 0, CHUNK, DEADLINE, lambda count: None)
        assert receiving.received() == CONTENT
        sender.close()
        if rest:
            stranger.sendall(rest)  # the listener's receiver is gone
        transfer(tmp_path)
    transfer(tmp_path)


def connects(source: str, port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.3, source_address=(source, 0)).close()
    except TimeoutError:  # what it sends is dropped
        return False
    return True


def test_only_the_host_of_the_sender_can_connect_and_nobody_when_no_receiver_waits(tmp_path: Path) -> None:
    with waiting() as (sender, receiving, port):
        assert not connects("127.0.0.2", port)
        assert connects("127.0.0.1", port)
        sender.send_range(source(tmp_path / "source", CONTENT), 0, CHUNK, DEADLINE, lambda count: None)
        assert receiving.received() == CONTENT
        assert not connects("127.0.0.1", port)
    assert not connects("127.0.0.1", port)
    transfer(tmp_path)


def test_receivers_that_wait_at_the_same_time_get_their_own_senders(tmp_path: Path) -> None:
    def send(sender: Peer, number: int) -> None:
        content = bytes([number]) * SIZE
        sender.send_range(source(tmp_path / str(number), content), 0, CHUNK, DEADLINE, lambda count: None)

    with waiting() as (first, one, port), waiting() as (second, two, other):
        assert port != other
        threads = [threading.Thread(target=send, args=each, daemon=True) for each in ((first, 1), (second, 2))]
        for thread in threads:
            thread.start()
        assert one.received() == bytes([1]) * SIZE
        assert two.received() == bytes([2]) * SIZE
        for thread in threads:
            thread.join(DEADLINE)


def test_a_receiver_whose_sender_never_comes_gives_its_listener_back(tmp_path: Path) -> None:
    ports = set()
    for _ in range(3):
        with waiting() as (sender, receiving, port):
            ports.add(port)
            sender.close()
            with pytest.raises(AssertionError, match=PeerLost.__name__):
                receiving.received()
    assert len(ports) == 1


def test_connections_in_use_at_the_same_time_share_no_context_and_later_ones_take_what_is_free() -> None:
    """UCX locks none of a context's caches: two threads that shared one freed a region twice, and the relay died."""
    from laminar.weights.ucx_bulk import Bulk

    def ends() -> list[Bulk]:
        return [Bulk(True), Bulk(True), *(Bulk(True, listen=("127.0.0.1", "127.0.0.1")) for _ in range(2))]

    def contexts(bulks: list[Bulk]) -> set[int]:
        return {bulk._context.handle for bulk in bulks}

    first = ends()
    used = contexts(first)
    assert len(used) == 4
    for bulk in first:
        bulk.cancel()
    second = ends()
    assert contexts(second) == used
    for bulk in second:
        bulk.cancel()


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_connections_one_after_the_other_leave_no_descriptors(count: int, tmp_path: Path) -> None:
    transfer(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(count):
        transfer(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


END = """
import os, sys
from contextlib import ExitStack
from pathlib import Path
from tests.weights.test_transport_sockets import Receiving, connected
from tests.weights.test_ucx_listener import transfer
transfer(Path(sys.argv[1]))
stack = ExitStack()
{}
"""
RECEIVE = """
sender, receiver = stack.enter_context(connected("ucx"))
receiving = Receiving(receiver, 1)
sender.read(10)
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", id="idle"),
        pytest.param(RECEIVE, id="while a receiver waits"),
        pytest.param("os.fork() or os._exit(0)", id="with a child"),
        pytest.param("os.fork() or sys.exit(0)", id="with a child that ends as Python does"),
    ],
)
def test_a_process_that_listened_ends_without_a_word(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", END.format(end), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
