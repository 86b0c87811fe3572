"""Continuous batching without a model: what an engine's time goes to, as events on a clock of its own. Pure.

All decoding requests gain one token a step; a step takes as long as the latency curve says for the batch. Nothing
is looped over tokens: time jumps to the next finish, arrival, tool answer, full cache, or the moment asked for.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections import deque
from dataclasses import dataclass

from laminar.rollout.latency import StepCurve

__all__ = ["EmulatedBatch", "Job"]

WATERMARK = 0.01
"""Share of the cache that has to stay free when a waiting request is let in, so that it is not put back at once."""
STEPS = 4
"""Steps for which there has to be room besides."""


@dataclass(slots=True)
class Job:
    """One request.

    Parameters
    ----------
    context
        Tokens of the prompt.
    length
        Tokens of the whole response, known to the emulation only.
    generated
        Tokens of the response so far, those from elsewhere included.
    tools
        ``(tokens, seconds)`` in order: after so many tokens the response waits so long for its tool.
    resume_at
        Emulated time at which the tool that it waits for answers; 0 when it waits for none.
    """

    id: str
    context: int
    length: int
    generated: int = 0
    tools: tuple[tuple[int, float], ...] = ()
    resume_at: float = 0.0
    first_token_at: float = 0.0
    base: int = 0
    """While decoding: ``generated`` is the batch's step count plus this."""
    serial: int = 0
    to_prefill: int = 0
    """Tokens, while it is prefilled beside others that decode."""


class EmulatedBatch:
    """One replica's batch.

    Parameters
    ----------
    curve
        Seconds of a step by batch.
    kv_tokens
        Size of the cache. What does not fit waits; when running ones outgrow it the newest is put back to the
        head of the queue and prefilled again.
    max_running
        Most requests that hold a slot; one that waits for a tool does.
    prefill_rate
        Tokens/s.
    prefill_chunk
        Tokens of a prefill that ride on a decode step: both share one pass over the weights, which is what a step of
        one request takes, so that the chunk costs so much less ("piggybacking" of Sarathi-Serve, OSDI 2024; chunked
        prefill of vLLM and SGLang). 0: decoding stands still during a prefill.

    Example
    -------
    Two requests of 10 and 30 tokens, steps of 1 s for one and 2 s for both; an eternity is one jump:

    >>> batch = EmulatedBatch(StepCurve(((1, 1.0), (2, 2.0))), kv_tokens=100, max_running=8, prefill_rate=1e9)
    >>> batch.submit(Job("a", context=5, length=10)); batch.submit(Job("b", context=5, length=30))
    >>> [(job.id, round(at, 3)) for job, at in batch.advance(1e6)]
    [('a', 20.0), ('b', 40.0)]
    """

    def __init__(
        self, curve: StepCurve, *, kv_tokens: int, max_running: int, prefill_rate: float, prefill_chunk: int = 0
    ) -> None:
        self.kv_total = kv_tokens
        self.max_running = max_running
        self.prefill_rate = prefill_rate
        self.prefill_chunk = prefill_chunk
        self.now = 0.0
        self.kv_used = 0
        self.decoded = 0
        """Tokens decoded in all."""
        self.prefilled = 0
        """Tokens prefilled in all, again included."""
        self.preemptions = 0
        self.kv_seconds = 0.0
        """Integral of ``kv_used`` over time."""
        self.step_seconds = [float(curve.seconds(batch)) for batch in range(max_running + 1)]
        self._chunk_seconds = max(0.0, prefill_chunk / prefill_rate - self.step_seconds[1])
        self._steps = 0
        self._serial = itertools.count()
        self._jobs: dict[str, Job] = {}
        self._decoding: dict[str, Job] = {}
        self._paused: dict[str, Job] = {}
        self._filling: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._stops: list[tuple[int, int, str]] = []  # step at which a job ends or calls a tool
        self._wakes: list[tuple[float, int, str]] = []

    # -- what is asked from outside; state is as of ``now`` ---------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._decoding) + len(self._paused) + len(self._filling)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """Requests that gain a token a step."""
        return len(self._decoding)

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self._jobs[job.id] = job
        self._waiting.append(job)

    def abort(self, request: str) -> Job | None:
        """Take a request out, with what it has; None if it is not here."""
        job = self._jobs.pop(request, None)
        if job is None:
            return None
        if request in self._decoding:
            self._leave(job)
        elif self._paused.pop(request, None) or self._filling.pop(request, None):
            self.kv_used -= job.context + job.generated
        else:
            self._waiting.remove(job)
        return job

    def generated(self, request: str) -> int | None:
        """Tokens that a request has; None if it is not here."""
        job = self._jobs.get(request)
        if job is None:
            return None
        return self._steps + job.base if request in self._decoding else job.generated

    @property
    def stall_rate(self) -> float:
        """Tokens prefilled for each second by which that holds up others that decode; infinite if it does not."""
        if not self.prefill_chunk:
            return self.prefill_rate
        return self.prefill_chunk / self._chunk_seconds if self._chunk_seconds else math.inf

    def ids(self) -> list[str]:
        """All requests that are here."""
        return list(self._jobs)

    def next_event(self) -> float | None:
        """When the next request ends or is let in, if nothing else happens; None if nothing will."""
        if (self._waiting and self._room()) or (self._filling and not self._decoding):
            return self.now
        times = [self._wakes[0][0]] if self._wakes else []
        if self._decoding:
            batch = len(self._decoding)
            steps = min(self._stops[0][0] - self._steps, max(0, self.kv_total - self.kv_used) // batch + 1)
            times.append(self.now + min(steps, self._steps_to_fill()) * self._step())
        return min(times, default=None)

    # -- time ---------------------------------------------------------------------------------------------

    def advance(self, until: float) -> list[tuple[Job, float]]:
        """Go on to ``until``; the requests that ended, each with its time. ``now`` may stay a step behind, and a
        prefill that has begun is gone through to its end."""
        ended: list[tuple[Job, float]] = []
        while True:
            self._wake()
            self._admit()
            if not self._decoding:
                wake = self._wakes[0][0] if self._wakes else math.inf
                then = max(self.now, min(wake, until))
                self._pass(then - self.now, 0)
                self.now = then  # the sum may fall short of it by rounding, and the tool would never answer
                if wake > until:
                    return ended
                continue
            batch = len(self._decoding)
            step = self._step()
            steps = min(self._stops[0][0] - self._steps, (self.kv_total - self.kv_used) // batch)
            if steps <= 0 and self._stops[0][0] > self._steps:
                self._preempt()
                continue
            steps = min(steps, self._steps_to_fill())
            if self._wakes:
                steps = min(steps, max(1, math.ceil((self._wakes[0][0] - self.now) / step)))
            steps = max(0, min(steps, math.floor((until - self.now) / step + 1e-9)))
            if steps <= 0 and self._stops[0][0] > self._steps:
                return ended
            self._steps += steps
            self.decoded += steps * batch
            self._pass(steps * step, steps * batch)
            self._fill(steps * self.prefill_chunk)
            self._stop(ended)

    def _step(self) -> float:
        """Seconds of a step now."""
        return self.step_seconds[len(self._decoding)] + (self._chunk_seconds if self._filling else 0.0)

    def _steps_to_fill(self) -> int:
        """Steps until the next request is prefilled; very many if none is at it."""
        for job in self._filling.values():
            return math.ceil(job.to_prefill / self.prefill_chunk)
        return sys.maxsize

    def _fill(self, tokens: int, *, alone: bool = False) -> None:
        """Prefill so many tokens, of one request after the other. ``alone``: with no step to ride on."""
        while self._filling and tokens:
            job = next(iter(self._filling.values()))
            some = min(job.to_prefill, tokens)
            tokens -= some
            job.to_prefill -= some
            self.prefilled += some
            if alone:
                self._pass(some / self.prefill_rate, 0)
            if not job.to_prefill:
                del self._filling[job.id]
                self._begin(job)

    def _begin(self, job: Job) -> None:
        """It is in the cache: decode, unless its tool has not answered yet."""
        if job.resume_at > self.now:
            self.kv_used -= job.context + job.generated
            self._pause(job, job.resume_at)
        else:
            job.resume_at = 0.0
            self._decode(job)

    def _pass(self, seconds: float, kv: int) -> None:
        self.kv_seconds += seconds * (self.kv_used + kv / 2)
        self.kv_used += kv
        self.now += seconds

    def _stop(self, ended: list[tuple[Job, float]]) -> None:
        """Requests that are at their end or at a tool call."""
        while self._stops and self._stops[0][0] <= self._steps:
            _, serial, request = heapq.heappop(self._stops)
            job = self._decoding.get(request)
            if job is None or job.serial != serial:
                continue
            self._leave(job)
            if job.generated >= job.length:
                del self._jobs[request]
                ended.append((job, self.now))
                continue
            (_, seconds), job.tools = job.tools[0], job.tools[1:]
            self._pause(job, self.now + seconds)

    def _leave(self, job: Job) -> None:
        """Out of the batch and of the cache."""
        job.generated = self._steps + job.base
        del self._decoding[job.id]
        self.kv_used -= job.context + job.generated
        while self._stops and not self._is_stop(self._stops[0]):
            heapq.heappop(self._stops)

    def _is_stop(self, stop: tuple[int, int, str]) -> bool:
        job = self._decoding.get(stop[2])
        return job is not None and job.serial == stop[1]

    def _pause(self, job: Job, until: float) -> None:
        job.resume_at, job.serial = until, next(self._serial)
        self._paused[job.id] = job
        self.kv_used += job.context + job.generated
        heapq.heappush(self._wakes, (until, job.serial, job.id))

    def _wake(self) -> None:
        """Tools that have answered: their requests decode again."""
        while self._wakes:
            at, serial, request = self._wakes[0]
            job = self._paused.get(request)
            if job is not None and job.serial == serial:
                if at > self.now:
                    return
                del self._paused[request]
                job.resume_at = 0.0
                self._decode(job)
            heapq.heappop(self._wakes)

    def _decode(self, job: Job) -> None:
        job.base, job.serial = job.generated - self._steps, next(self._serial)
        self._decoding[job.id] = job
        stop = job.tools[0][0] if job.tools else job.length
        heapq.heappush(self._stops, (max(stop, job.generated) - job.base, job.serial, job.id))

    def _room(self) -> bool:
        job = self._waiting[0]
        free = self.kv_total - self.kv_used - job.context - job.generated
        spare = max(WATERMARK * self.kv_total, STEPS * (len(self._decoding) + 1))
        return self.running < self.max_running and (free >= spare or not self.running)

    def _admit(self) -> None:
        """Let waiting requests in while there is room, and prefill them."""
        while self._waiting and self._room():
            job = self._waiting.popleft()
            job.to_prefill = job.context + job.generated
            self.kv_used += job.to_prefill
            self._filling[job.id] = job
        if self._filling and not (self.prefill_chunk and self._decoding):
            self._fill(sum(job.to_prefill for job in self._filling.values()), alone=True)

    def _preempt(self) -> None:
        """The cache is full: the newest request goes back to the head of the queue."""
        if self._filling:
            newest = self._filling.popitem()[1]
            self.kv_used -= newest.context + newest.generated
        else:
            newest = max(self._decoding.values(), key=lambda job: job.serial)
            self._leave(newest)
        self._waiting.appendleft(newest)
        self.preemptions += 1
