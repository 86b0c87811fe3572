"""Scores answers in processes that are killed when a score takes too long: no reward function can stop a run."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple

import cloudpickle

from laminar.environments.described import described
from laminar.environments.environment import Environment
from laminar.environments.process import ScoringProcess
from laminar.errors import UserError
from laminar.trajectory import Prompt, Score, ScoreStatus

__all__ = ["Scorer"]

_CLOSE_SECONDS = 10.0
_CLOSED = "the scorer was closed before the answer was scored"


class Scorer:
    """Scores with one environment in ``processes`` processes of their own.

    A call past its deadline is killed, with every process that it started, and yields a Score with status
    ``"timeout"``; one that raises, or takes its process down, yields ``"error"`` with a message that names the
    function; later calls go on. What a reward prints goes to stderr. The processes end by themselves if this one is
    killed. Can be made and used on any thread; the constructor does not wait for the processes.

    Parameters
    ----------
    environment
        What scores. It is pickled here, once.
    processes
        How many scores run at the same time.
    deadline
        Longest that one score may run, in seconds; waiting for a free process does not count.

    Raises
    ------
    UserError
        The environment cannot be sent to another process.

    Example
    -------
    >>> from laminar.environments import reasoning_gym
    >>> sums = reasoning_gym("chain_sum")
    >>> with Scorer(sums) as scorer:
    ...     scorer.score(sums.prompt(0), sums.prompt(0).row["answer"]).result(timeout=60).reward
    1.0
    """

    def __init__(self, environment: Environment, *, processes: int = 1, deadline: float = 10.0) -> None:
        self.deadline = deadline
        self._label = environment.scored_by
        self._environment = _pickled(environment)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[ScoringProcess] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"laminar-scorer-{index}", daemon=True)
            for index in range(processes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def longest(self) -> float:
        """Longest that one score of an idle scorer can take to arrive, in seconds."""
        return ScoringProcess.longest_start + self.deadline + _CLOSE_SECONDS

    def score(self, prompt: Prompt, response: str) -> Future[Score]:
        """Queue one answer. The future's result is a Score whatever happens; it never holds an exception.

        Raises
        ------
        RuntimeError
            The scorer is closed.
        """
        future: Future[Score] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the scorer is closed")
            self._calls.put(_Call(prompt, response, future))
        return future

    def close(self) -> None:
        """End all processes now. Scores still outstanding end with status ``"error"``. Idempotent, at most 10 s."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
            running = list(self._running)
        for process in running:
            process.kill()
        expires = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, expires - time.monotonic()))

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """One thread for each process, which answers one call after the other and is replaced when it has ended."""
        process = self._start()
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if isinstance(process, str) or not process.is_ready():
                    self._discard(process)
                    process = self._start()
                score = self._answer(process, call)
            except Exception as error:  # noqa: BLE001  somebody waits for the future: it must not stay open
                score = Score(reward=None, status="error", message=f"{self._label}: {described(error)}")
            call.future.set_result(score)
        self._discard(process)

    def _answer(self, process: ScoringProcess | str, call: _Call) -> Score:
        """The Score of one call, whatever becomes of the process (or why there is none)."""
        started = time.perf_counter()
        status: ScoreStatus = "error"
        if isinstance(process, str):
            message = process
        elif process.fault:
            message = f"{self._label} could not be loaded in its own process: {process.fault}"
        else:
            try:
                return process.ask(call.prompt, call.response, self.deadline)
            except TimeoutError:
                process.kill()
                status, message = "timeout", f"{self._label} ran longer than {self.deadline:g} s and was stopped"
            except (EOFError, OSError):
                message = f"{self._label} ended its own process ({process.kill()})"
            except Exception as error:  # noqa: BLE001  a row may refuse to be pickled in any way; the Score says so
                process.kill()
                message = f"row {call.prompt.id} cannot be sent to {self._label}: {described(error)}"
        if self._closed:
            status, message = "error", _CLOSED
        return Score(reward=None, status=status, message=message, seconds=time.perf_counter() - started)

    def _start(self) -> ScoringProcess | str:
        """A process with the environment loaded, or with its fault; or why there is none."""
        with self._lock:
            if self._closed:
                return _CLOSED
            try:
                process = ScoringProcess()
            except OSError as error:
                return f"no process could be started for {self._label}: {error}"
            self._running.add(process)
        process.load(self._environment)
        return process

    def _discard(self, process: ScoringProcess | str) -> None:
        if isinstance(process, ScoringProcess):
            process.close()
            with self._lock:
                self._running.discard(process)


class _Call(NamedTuple):
    prompt: Prompt
    response: str
    future: Future[Score]


def _pickled(environment: Environment) -> bytes:
    try:
        return bytes(cloudpickle.dumps(environment))
    except Exception as error:
        message = f"{environment.scored_by} cannot be sent to another process: {described(error)}"
        raise UserError(message) from error
