"""What a relay does not take: it says why in one line, and goes on serving what it has."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laminar.errors import LaminarError
from laminar.weights import wire
from laminar.weights.chain import Member, Plan
from laminar.weights.layout import Layout
from laminar.weights.mapping import Segment
from laminar.weights.transport import installed, open_transport, split_address
from tests.weights.relay_host import SIZE, Host, layout


@pytest.fixture
def host(root: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(run: str = "one", token: str = "") -> Host:
        hosts.append(Host(root.parent / f"laminar-{len(hosts)}", run, token))
        return hosts[-1]

    yield make
    for each in hosts:
        each.node.close()
        each.owner.close()


@pytest.mark.parametrize(
    ("other_run", "other_layout", "why"),
    [
        ("two", layout(), "this relay serves run two, it was sent weights of run one"),
        ("one", layout("b"), "the model changed under a run; start a new one"),
    ],
)
def test_weights_of_another_run_or_model_are_refused_and_the_old_version_stays(
    host: Callable[..., Host], other_run: str, other_layout: Layout, why: str
) -> None:
    first, second = host(), host(other_run)
    first.owner.prepare(layout())
    second.owner.prepare(other_layout)
    held = second.publish(3)
    first.publish(4)
    first.send(4, second)
    assert why in first.said("lost").why
    with second.owner.pinned(3) as slot:
        slot.verify()
        assert slot.digest == held


@pytest.mark.parametrize("token", ["", "guessed"])
def test_who_does_not_know_the_token_of_the_run_is_refused_and_the_old_version_stays(
    host: Callable[..., Host], token: str
) -> None:
    stranger, relay, friend = host(token=token), host(token="secret"), host(token="secret")
    for each in (stranger, relay, friend):
        each.owner.prepare(layout())
    relay.publish(3)
    stranger.publish(4)
    stranger.send(4, relay)
    assert "does not know the token of run one" in stranger.said("lost").why
    assert relay.owner.held() == [3]
    relay.send(3, friend)
    friend.said("promoted")


def test_a_relay_without_memory_says_how_much_is_missing(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = host(), host()
    first.owner.prepare(layout())
    first.publish(1)
    full = LaminarError("slots of the weights need 3 bytes, 2 are free: free shared memory")

    def no_room(layout: Layout) -> None:
        raise full

    monkeypatch.setattr(second.owner, "prepare", no_room)
    first.send(1, second)
    assert "2 are free: free shared memory" in first.said("lost").why


def test_bytes_damaged_in_memory_are_noticed_by_who_receives_them(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    first.owner.prepare(layout())
    first.publish(1)
    segment = Segment(first.owner.root, writable=True)
    segment.slots[segment.head[1]].payload[SIZE // 2] ^= 1
    first.send(1, second)
    assert "arrived damaged" in second.said("damaged").why
    first.said("lost")
    assert second.owner.held() == []


@pytest.mark.parametrize(
    ("speech", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is no relay"),
        (wire.HEADER.pack(b"LMNR", 99, 1, 0), "speaks protocol 99, this one 2"),
        (wire.HEADER.pack(b"LMNR", 2, 1, 1 << 30), "frame HELLO of 1,073,741,824 bytes, at most 1,048,576"),
    ],
)
def test_who_speaks_another_protocol_is_hung_up_on_with_one_line(
    host: Callable[..., Host], caplog: pytest.LogCaptureFixture, speech: bytes, why: str
) -> None:
    relay = host()
    relay.owner.prepare(layout())
    relay.publish(1)
    _, address, port = split_address(relay.node.address)
    with socket.create_connection((address, port), timeout=10) as stranger:
        stranger.sendall(speech)
        assert stranger.recv(1) == b""
    assert why in caplog.text
    assert relay.owner.held() == [1]


def test_a_member_that_is_no_relay_is_passed_over_with_one_line(host: Callable[..., Host]) -> None:
    first, last = host(), host()
    for each in (first, last):
        each.owner.prepare(layout())
    first.publish(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = Member("stranger", "here", f"tcp://127.0.0.1:{server.getsockname()[1]}")

        def answer() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                accepted.recv(1 << 16)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        first.node.send(Plan(1, 1, (first.member, stranger, last.member), 1 << 18, 0, first.nbytes))
        assert "is no relay: its first bytes are b'HTTP'" in first.said("lost").why
        last.said("promoted")
        thread.join(20)
    assert last.owner.held() == [1]


@pytest.mark.parametrize("name", installed())
def test_a_port_in_use_is_one_line_that_says_what_to_do(name: str) -> None:
    transport = open_transport(name)
    listener = transport.listen("127.0.0.1")
    _, _, port = split_address(listener.address)
    with pytest.raises(LaminarError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; give another"):
        transport.listen("127.0.0.1", port)
    listener.close()
