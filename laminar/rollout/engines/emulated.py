"""The engine without a model: it takes the time that a GPU replica would, so that scheduling can be measured.

Ids are run lengths: an id of 64 stands for 64 tokens, so that long responses travel in few numbers. All counts of
``gauges`` are tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from laminar.rollout.emulation import Emulation
from laminar.rollout.engine import Delta, FinishReason, Gauges, Generated, Generation
from laminar.rollout.engines.emulated_batch import EmulatedBatch, Job
from laminar.rollout.engines.emulated_workload import (
    Workload,
    lengths_from_parquet,
    response_tokens,
    sandbox_seconds,
    step_curve,
)
from laminar.trajectory import Version

if TYPE_CHECKING:
    import torch

__all__ = ["EmulatedEngine"]

logger = logging.getLogger(__name__)

SHORTEST_SLEEP = 0.004
"""Seconds; requests that come or end within it are dealt with together."""


@dataclass(slots=True)
class _Request:
    generation: Generation
    on_finish: Callable[[Generated], None]
    job: Job
    ids: list[int] = field(default_factory=list)
    """What it has been reported to have: run lengths, the prefix's first."""
    reported: int = 0
    """The same in tokens."""


LONGEST_SLEEP = 60.0

_End: TypeAlias = tuple[Callable[[Generated], None], Generated]


class EmulatedEngine:
    """One emulated replica, one thread that sleeps from event to event.

    Parameters
    ----------
    model
        Not looked at.
    emulation
        Latencies, lengths, time scale.
    kv_tokens, max_running
        As of every engine.
    seed, threads
        Not used: what a trajectory is like must not depend on the replica.
    """

    def __init__(
        self,
        model: str = "",
        *,
        emulation: Emulation | None = None,
        kv_tokens: int = 65536,
        max_running: int = 256,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        self.version: Version | None = None
        self.emulation = emulation or Emulation()
        settings = self.emulation
        lengths = lengths_from_parquet(settings.lengths) if settings.lengths else response_tokens(settings.workload)
        self.workload = Workload(
            lengths, settings.seed, settings.group_correlation, settings.tool_calls, sandbox_seconds()
        )
        self.batch = EmulatedBatch(
            step_curve(settings.model, settings.tensor_parallel),
            kv_tokens=kv_tokens,
            max_running=max_running,
            prefill_rate=settings.prefill_tokens_per_second,
            prefill_chunk=settings.prefill_chunk,
        )
        self._changed = threading.Condition()
        self._requests: dict[str, _Request] = {}
        self._ended: list[_End] = []
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._sleeps_until = 0.0

    # -- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve. Its clock begins too."""
        self._closing = False
        self._began = time.monotonic() - self.batch.now / self.emulation.time_scale
        self._thread = threading.Thread(target=self._serve, name="laminar-emulated", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the thread; what runs is aborted. Idempotent."""
        with self._changed:
            thread, self._thread, self._closing = self._thread, None, True
            self._changed.notify()
        if thread is None:
            return
        thread.join(10)
        with self._changed:
            left = [*self._ended, *(self._take(request, "abort") for request in list(self._requests))]
            self._ended = []
        _tell(left)

    # -- requests ---------------------------------------------------------------------------------------

    def submit(self, generation: Generation, on_finish: Callable[[Generated], None]) -> None:
        """Queue a request.

        Raises
        ------
        ValueError
            It can never fit into the cache, or runs already.
        RuntimeError
            Nothing is served.
        """
        cap, context = generation.sampling.max_new_tokens, sum(generation.prompt_ids)
        if context + cap > self.batch.kv_total:
            raise ValueError(
                f"request {generation.id}: a prompt of {context} tokens and {cap} new ones make {context + cap}, "
                f"the cache holds {self.batch.kv_total}"
            )
        generated = sum(generation.prefix_ids)
        length = max(generated, self.workload.length(generation.id, cap))
        tools = tuple(tool for tool in self.workload.tools(generation.id, length) if tool[0] > generated)
        with self._changed:
            if not self.alive():
                raise RuntimeError(f"request {generation.id} was not taken: the engine is closed or not started")
            if generation.id in self._requests:
                raise ValueError(f"request {generation.id} is running already")
            job = Job(generation.id, context, length, generated, tools)
            if generation.waits_until > time.time():
                job.resume_at = self._now() + (generation.waits_until - time.time()) * self.emulation.time_scale
            self._requests[generation.id] = _Request(generation, on_finish, job, list(generation.prefix_ids), generated)
            self.batch.submit(job)
            if self._sleeps_until > time.monotonic() + SHORTEST_SLEEP:
                self._changed.notify()

    def progress(self) -> list[Delta]:
        """New tokens of all running requests since the last call, one id each."""
        with self._changed:
            self._advance()
            deltas: list[Delta] = []
            for name, request in self._requests.items():
                generated = self.batch.generated(name)
                if generated is not None and generated > request.reported:
                    new = generated - request.reported
                    deltas.append(Delta(name, len(request.ids), (new,), (0.0,)))
                    request.ids.append(new)
                    request.reported = generated
            return deltas

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or ended ones are left alone."""
        with self._changed:
            self._advance()
            if request_id not in self._requests:
                return  # its end is being told
            ended = [self._take(request_id, "abort")]
        _tell(ended)

    # -- weights ----------------------------------------------------------------------------------------

    def load(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take as long as loading would. Nothing may be running."""
        if self._requests:
            raise RuntimeError(f"cannot load version {version}: {len(self._requests)} requests are running")
        time.sleep(self.emulation.load_seconds / self.emulation.time_scale)
        self.version = version

    def weights(self) -> Mapping[str, torch.Tensor]:
        """There are none."""
        return {}

    def gauges(self) -> Gauges:
        """Load now."""
        with self._changed:
            self._advance()
            batch = self.batch
            return Gauges(batch.running, batch.waiting, batch.kv_used, batch.kv_total)

    def measures(self) -> dict[str, Any]:
        """For benchmarks: emulated seconds, tokens decoded, integral of KV use over time, preemptions."""
        with self._changed:
            self._advance()
            batch = self.batch
            return {
                "seconds": self._now(),
                "decoded": batch.decoded,
                "prefilled": batch.prefilled,
                "kv_seconds": batch.kv_seconds,
                "preemptions": batch.preemptions,
            }

    # -- its thread -------------------------------------------------------------------------------------

    def _now(self) -> float:
        return (time.monotonic() - self._began) * self.emulation.time_scale

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._advance()
                ended, self._ended = self._ended, []
                if self._closing:
                    self._ended = ended
                    return
                if not ended:
                    seconds = self._until_next()
                    self._sleeps_until = time.monotonic() + seconds
                    self._changed.wait(seconds)
                    continue
            _tell(ended)

    def _until_next(self) -> float:
        """Seconds of sleep."""
        event = self.batch.next_event()
        if event is None:
            return LONGEST_SLEEP
        return min(LONGEST_SLEEP, max(SHORTEST_SLEEP, (event - self._now()) / self.emulation.time_scale))

    def _advance(self) -> None:
        """Bring the batch up to now; what ended is told by the thread."""
        for job, _ in self.batch.advance(self._now()):
            reason: FinishReason = "stop"
            if job.generated >= self._requests[job.id].generation.sampling.max_new_tokens:
                reason = "length"
            self._ended.append(self._take(job.id, reason))
        if self._ended:
            self._changed.notify()

    def _take(self, name: str, reason: FinishReason) -> _End:
        request = self._requests.pop(name)
        job = self.batch.abort(name) or request.job
        ids = request.ids + ([job.generated - request.reported] if job.generated > request.reported else [])
        waits = 0.0
        if reason == "abort" and job.resume_at > self.batch.now:
            waits = time.time() + (job.resume_at - self._now()) / self.emulation.time_scale
        return request.on_finish, Generated(name, ids, [0.0] * len(ids), reason, waits_until=waits)


def _tell(ended: list[_End]) -> None:
    for on_finish, generated in ended:
        try:
            on_finish(generated)
        except Exception:
            logger.exception("on_finish of request %s raised", generated.id)
