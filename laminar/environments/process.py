"""The parent's side of one process that scores: start it, ask it, kill it with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe

from laminar.environments.child import READY
from laminar.trajectory import Prompt, Score

__all__ = ["ScoringProcess"]

_START_SECONDS = 60.0
_KILL_SECONDS = 10.0
_STALL_SECONDS = 30
"""Longest that a message may be half sent or half received: the process is stopped, or its code lets no other run."""
_STDERR = 2
_BOOT = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from laminar.environments.child import serve
serve(connection, int(sys.argv[2]))
"""


class ScoringProcess:
    """A fresh interpreter that holds one environment, in a process group of its own.

    Not a ``multiprocessing`` process: that one would run the user's ``__main__`` again in every child. Its stdout is
    our stderr, so that a ``print`` in a reward function does not end up in a command's output.

    Attributes
    ----------
    fault
        Why the environment could not be loaded; empty if it could.
    """

    longest_start = _START_SECONDS + _KILL_SECONDS + 2 * _STALL_SECONDS
    """Longest that ``load`` can take, in seconds."""

    def __init__(self) -> None:
        self.fault = "it was not started"
        self._connection, theirs = Pipe()
        _never_stall(self._connection.fileno(), _STALL_SECONDS)
        lifeline, self._lifeline = os.pipe()
        self._lock = threading.Lock()
        self._is_alive = True
        passed = (theirs.fileno(), lifeline)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                process_group=0,
            )
        finally:
            theirs.close()
            os.close(lifeline)

    def load(self, environment: bytes) -> None:
        """Send the pickled environment and wait until it is there, or set ``fault``."""
        try:
            self._connection.send(sys.path)
            self._connection.send_bytes(environment)
            if self._connection.poll(_START_SECONDS):
                reply = self._connection.recv()
                self.fault = "" if reply == READY else reply
            else:
                self.fault = f"it did not start within {_START_SECONDS:g} s"
        except (EOFError, OSError):
            self.fault = f"it ended while it started ({self.kill()})"
        if self.fault:
            self.kill()

    def is_ready(self) -> bool:
        """Whether it is loaded and waits for a question. What an idle process can send is only its end."""
        try:
            return not self.fault and self._is_alive and not self._connection.poll(0)
        except OSError:
            return False

    def ask(self, prompt: Prompt, response: str, deadline: float) -> Score:
        """The score of one response.

        Raises
        ------
        TimeoutError
            There was none within ``deadline`` seconds, or the process does not take the question; it is still there.
        EOFError, OSError
            The process ended.
        """
        try:
            self._connection.send((prompt, response))
            if not self._connection.poll(deadline):
                raise TimeoutError(f"no score within {deadline:g} s")
            score: Score = self._connection.recv()
        except BlockingIOError as error:
            raise TimeoutError(f"a message stood still for {_STALL_SECONDS} s") from error
        return score

    def kill(self) -> str:
        """End the process and its whole group, if they have not ended by themselves; returns how it ended."""
        with self._lock:
            if self._is_alive:
                # Before it is reaped, so that the group's number cannot have been given to anybody else.
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it goes when it wakes up
                    self._process.wait(_KILL_SECONDS)
                self._is_alive = False
        return _ending(self._process.returncode)

    def close(self) -> None:
        """Kill it and give back its file descriptors. Nobody may use it afterwards."""
        self.kill()
        with self._lock:
            self._connection.close()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1


def _never_stall(descriptor: int, seconds: int) -> None:
    """Have reads and writes of a socket that wait longer fail with ``BlockingIOError``."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _ending(code: int | None) -> str:
    """How a process ended, from its return code.

    Example
    -------
    >>> _ending(3), _ending(-9), _ending(-40), _ending(None)
    ('exit code 3', 'killed by SIGKILL', 'killed by signal 40', 'killed, and not gone yet')
    """
    if code is None:
        return "killed, and not gone yet"
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
