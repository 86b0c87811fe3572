"""What runs inside a scorer's process: one environment, one score after the other, until the parent closes or dies."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from laminar.environments.described import described
from laminar.environments.environment import Environment
from laminar.environments.rewards import RewardError, as_score
from laminar.trajectory import Prompt, Score

__all__ = ["READY", "serve"]

READY = "ready"


def serve(connection: Connection, lifeline: int) -> None:
    """Receive an environment, then pairs of prompt and response; answer each with a Score.

    Parameters
    ----------
    connection
        To the parent. The first message is the environment; the reply is ``READY`` or why it could not be loaded.
    lifeline
        Read end of a pipe of which the parent holds the other end: its end-of-file is the parent's death.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(lifeline)
    os.set_inheritable(connection.fileno(), False)
    try:
        environment: Environment = pickle.loads(connection.recv_bytes())
        environment.prepare()
    except Exception as error:  # noqa: BLE001  the process boundary: the parent reports it
        connection.send(described(error))
        return
    connection.send(READY)
    while True:
        try:
            prompt, response = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(_scored(environment, prompt, response))


def _scored(environment: Environment, prompt: Prompt, response: str) -> Score:
    """Score one response; what it raises becomes a Score with the message."""
    started = time.perf_counter()
    try:
        score = as_score(environment.score(prompt, response), environment.scored_by)
        pickle.dumps(score)
    except RewardError as error:
        score = Score(reward=None, status="error", message=str(error))
    except BaseException as error:  # noqa: BLE001  the process boundary: SystemExit is a fault of one score, too
        score = Score(reward=None, status="error", message=f"{environment.scored_by} raised {described(error)}")
    return replace(score, seconds=time.perf_counter() - started)


def _die_with_parent(lifeline: int) -> None:
    """Have the kernel end this process, and all that it started, when the parent is gone.

    A thread that waits for it would not do: code that holds the interpreter's lock, such as one endless regular
    expression, keeps every other thread from running. SIGIO ends a process by default.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
