"""A killed relay's connections are broken by another process, without waiting for the kernel to get round to it."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from laminar.weights.lifeline import Lifeline

RELAY = """
import socket, sys, time
from laminar.weights.lifeline import Lifeline
connection, other = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
lifeline = Lifeline()
lifeline.add(connection)
print("added", flush=True)
sys.stdin.readline()
lifeline.close()
time.sleep(60)
"""
DEADLINE = 20


@pytest.fixture
def relay() -> Iterator[tuple[subprocess.Popen[str], socket.socket, socket.socket]]:
    """A process with two connections, the first of them on its lifeline; our ends of both. This process keeps theirs
    open too, so that the kernel breaks neither when the other process ends."""
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [pair[1].fileno() for pair in pairs]
    process = subprocess.Popen(
        [sys.executable, "-c", RELAY, *map(str, theirs)],
        pass_fds=theirs,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "added\n"
    for ours, _ in pairs:
        ours.settimeout(DEADLINE)
    yield process, pairs[0][0], pairs[1][0]
    process.kill()
    process.communicate(timeout=DEADLINE)
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_connection_is_broken_when_its_process_is_killed_although_a_copy_is_open_elsewhere(relay) -> None:
    process, held, other = relay
    process.kill()
    assert held.recv(1) == b""
    process.wait(DEADLINE)
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)


def test_a_connection_is_broken_while_the_kernel_still_unmaps_the_dying_process(relay) -> None:
    """Its own sockets are open meanwhile, that to its lifeline too: nothing may be read from it that waits."""
    process, held, _ = relay
    [child] = _children(process.pid)
    _await_handler(child, signal.SIGTERM)
    os.kill(child, signal.SIGTERM)  # as the kernel does when the first thread has ended
    assert held.recv(1) == b""
    assert process.poll() is None


def test_nothing_is_broken_when_a_process_lets_its_lifeline_go_and_is_killed_later(relay) -> None:
    process, held, _ = relay
    children = _children(process.pid)
    assert len(children) == 1
    process.stdin.write("\n")
    process.stdin.flush()
    descriptor = os.pidfd_open(children[0])
    assert select.select([descriptor], [], [], DEADLINE)[0], "the other process did not end"
    os.close(descriptor)
    process.kill()
    process.wait(DEADLINE)
    held.setblocking(False)
    with pytest.raises(BlockingIOError):
        held.recv(1)


def test_a_lifeline_that_was_cut_hurts_nobody() -> None:
    before = set(_children(os.getpid()))
    lifeline = Lifeline()
    [child] = set(_children(os.getpid())) - before
    os.kill(child, signal.SIGKILL)
    left, right = socket.socketpair()
    with left, right:
        for _ in range(3):
            lifeline.add(left)
        right.send(b"x")
        assert left.recv(1) == b"x"
    lifeline.close()
    lifeline.close()


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def _await_handler(pid: int, number: signal.Signals) -> None:
    """Until a process that just starts has a handler for a signal."""
    until = time.monotonic() + DEADLINE
    while not int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16) >> (number - 1) & 1:
        assert time.monotonic() < until, f"process {pid} handles no {number.name}"
        time.sleep(0.01)
