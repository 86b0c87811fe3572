"""Breaks a relay's connections the moment the relay is killed.

The kernel closes a killed process's sockets only after it has unmapped its memory: tens of milliseconds a GiB, more on
a busy machine, seconds for a large relay; so long its neighbours wait for bytes. Here a small process of its own, which
maps nothing, holds a copy of every connection. The kernel tells it when one of two threads of the relay that only wait
has ended, which nearly always comes before the unmapping (the last thread to end does that), and it shuts all
connections down.

This file is run by path, by a Python without site packages: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading

__all__ = ["Lifeline"]

PR_SET_PDEATHSIG = 1
PIDFD_THREAD = os.O_EXCL
HOLD, BYE = b"+", b"-"
START_DEADLINE = 10.0
END_DEADLINE = 5.0


class Lifeline:
    """The relay's side. Without the other process (it does not start, or dies) a death is noticed later, as ever."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._started = threading.Event()
        self._socket: socket.socket | None = None
        # The kernel's signal comes when the *thread* ends that started the other process: it must live as long as we.
        threading.Thread(target=self._hold, name="laminar-lifeline", daemon=True).start()
        self._started.wait(START_DEADLINE)

    def add(self, connection: socket.socket) -> None:
        """Have a connection broken with this process."""
        with self._mutex:
            if self._socket is not None:
                try:
                    socket.send_fds(self._socket, [HOLD], [connection.fileno()])
                except OSError:  # it has died
                    self._socket.close()
                    self._socket = None

    def close(self) -> None:
        """End the other process. Idempotent."""
        with self._mutex:
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it has died
                    self._socket.send(BYE)
                self._socket.close()
                self._socket = None
        self._ended.set()

    def _hold(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), str(os.getpid())]
            try:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            except OSError:
                ours.close()
                self._started.set()
                return
        self._socket = ours
        self._started.set()
        self._ended.wait()
        try:
            process.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel is at it; nobody waits for this thread
                process.wait(END_DEADLINE)


class _Watch:
    """The other process: holds what it is sent until the relay says goodbye (nothing is broken then) or dies."""

    def __init__(self, relay: socket.socket, parent: int) -> None:
        self._relay = relay
        self._relay.setblocking(False)  # ``recv_fds`` does not pass its flags on
        self._held: dict[int, socket.socket] = {}
        self._poller = select.poll()
        self._poller.register(relay, select.POLLIN)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # meant for the relay, which may go on
        signal.signal(signal.SIGTERM, lambda number, frame: self._died())
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        self._main_thread = -1
        with contextlib.suppress(OSError):  # before Linux 6.9: one thread to watch has to do
            self._main_thread = os.pidfd_open(parent, PIDFD_THREAD)
            self._poller.register(self._main_thread, select.POLLIN)

    def run(self) -> None:
        """Until the relay says goodbye."""
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._main_thread:
                    self._died()
                elif descriptor != self._relay.fileno():
                    self._poller.unregister(descriptor)
                    self._held.pop(descriptor).close()
                elif (word := self._take()) == BYE:
                    return
                elif not word:
                    self._died()

    def _take(self) -> bytes:
        word, descriptors, *_ = socket.recv_fds(self._relay, 1, 1)
        for descriptor in descriptors:
            self._held[descriptor] = socket.socket(fileno=descriptor)
            self._poller.register(descriptor, select.POLLRDHUP | select.POLLHUP)
        return word

    def _died(self) -> None:
        with contextlib.suppress(OSError):  # nothing more was sent
            while self._take():
                pass
        for connection in self._held.values():
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        os._exit(0)


if __name__ == "__main__":
    _Watch(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
