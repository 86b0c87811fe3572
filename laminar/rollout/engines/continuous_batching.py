"""The library's continuous batching manager, set up for reinforcement learning.

Every name of ``transformers.generation.continuous_batching`` that we rely on, public or not, stands in this
file and in ``packed_attention``. What it adds to the manager:

- results reach a plain callback on the generation thread: no event loop, no polling of a queue;
- a cancelled request delivers what it has, on that thread too, so that a request ends exactly once;
- the end of the loop, for whatever reason, is told;
- the prefix cache is dropped when the weights change (the library keeps it, also over ``reset``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

__all__ = ["Batching", "Output"]

Output = Any
"""The library's ``GenerationOutput``; of it ``request_id``, ``generated_tokens``, ``logprobs``, ``error`` and
``timestamps`` are used."""

# Not 1.0 and not None, or the library makes no temperature processor and the temperature of a request is an
# unknown argument. Never drawn with: every request brings its own.
_SENTINEL_TEMPERATURE = 0.99
_GREEDY_TEMPERATURE = 1e-6  # do_sample is one setting for all requests; at this temperature a draw is the argmax


class _Scheduler(FIFOScheduler):  # type: ignore[misc]
    """First come, first served; tells which requests were cancelled."""

    on_cancelled: Callable[[Any], None] | None = None

    def reset(self) -> None:
        super().reset()
        self._cancelled_early: set[str] = set()

    def add_waiting_request(self, state: Any) -> None:
        super().add_waiting_request(state)
        if state.request_id in self._cancelled_early:
            self._cancelled_early.remove(state.request_id)
            self.set_request_cancellation(state.request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        # The loop drains the queue of requests before that of cancellations: a cancellation can come first.
        known = self.active_requests.keys() | self.waiting_requests.keys()
        self._cancelled_early |= self._requests_to_cancel - known
        states: list[Any] = super().clear_cancelled_requests()
        if states:
            # Set when requests had to be put back for want of cache, and otherwise cleared only when one
            # finishes: with the running ones cancelled, those put back would wait for ever.
            self.block_new_requests = False
        for state in states:
            if self.on_cancelled is not None:
                self.on_cancelled(state.to_generation_output())
        return states


SCHEDULER_MAPPING["laminar"] = _Scheduler


class _Router(OutputRouter):  # type: ignore[misc]
    """Hands each result to a callback on the generation thread."""

    def __init__(self, on_output: Callable[[Output], None]) -> None:
        super().__init__()
        self._on_output = on_output

    def deliver(self, output: Output) -> None:
        self._on_output(output)

    def deliver_batch(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._on_output(output)


class Batching:
    """A generation loop over one model.

    Parameters
    ----------
    model
        A causal LM of the library, its attention implementation set.
    eos_ids
        Every id that ends an answer; may be empty.
    kv_tokens, page_size, max_batch_tokens, max_running
        Cache size in tokens, its granularity in tokens, tokens of one forward pass, requests of one.
    seed
        Of the process's torch generator, which the library seeds.
    on_output, on_cancelled
        Called on the generation thread with a finished (or failed) request, and with a cancelled one.
    on_end
        Called on the generation thread when the loop has ended, whatever ended it.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        kv_tokens: int,
        page_size: int,
        max_batch_tokens: int,
        max_running: int,
        seed: int,
        on_output: Callable[[Output], None],
        on_cancelled: Callable[[Output], None],
        on_end: Callable[[], None],
    ) -> None:
        self._eos_ids = list(eos_ids)
        self._manager: Any = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=_SENTINEL_TEMPERATURE,
                top_k=0,
                top_p=1.0,
                eos_token_id=self._eos_ids or -1,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=-(-kv_tokens // page_size),
                max_batch_tokens=max_batch_tokens,
                max_requests_per_batch=min(max_running, max_batch_tokens),
                max_blocks_per_request=0,
                use_cuda_graph=False,
                use_async_batching=False,
                scheduler_type="laminar",
                return_logprobs=True,
                per_request_processors=True,
                auto_switch_to_flash=False,
                seed=seed,
            ),
        )
        processors = [type(p).__name__ for p in self._manager.logit_processor.logits_processor]
        assert processors == ["ContinuousBatchingTemperatureLogitsWarper"], processors
        self._manager.output_router = _Router(on_output)
        self._manager.warmup()  # makes the processor now, here; on a CPU it runs nothing
        self._processor: Any = self._manager.batch_processor
        self._processor.scheduler.on_cancelled = on_cancelled
        self._on_end = on_end
        self.capacity: int = infer_max_single_request_tokens(self._processor.cache)
        """Longest request that an empty cache can hold, in tokens."""

    def start(self) -> None:
        """Start the generation thread."""
        serve = self._manager._run_generation_loop

        def serve_and_tell() -> None:
            try:
                serve()
            finally:
                self._on_end()

        self._manager._run_generation_loop = serve_and_tell
        # A thread is a daemon if the one that made it is: a forgotten engine must not keep a process alive.
        starter = threading.Thread(target=self._manager.start, daemon=True)
        starter.start()
        starter.join()

    # ------------------------------------------------------------------------------------------- requests

    def add(self, key: str, ids: list[int], *, temperature: float, max_new_tokens: int) -> None:
        """Queue a request. ``key`` must never have been used: the library mixes up a cancelled request and
        its successor of the same name."""
        self._manager.add_request(
            ids,
            request_id=key,
            max_new_tokens=max_new_tokens,
            record_timestamps=True,
            eos_token_id=self._eos_ids,
            temperature=max(float(temperature), _GREEDY_TEMPERATURE),
        )

    def cancel(self, key: str) -> None:
        """Ask the loop to drop a request before its next step; ``on_cancelled`` gets what it has."""
        self._manager.cancel_request(key)

    def generated(self, key: str, start: int) -> tuple[list[int], list[float]]:
        """Ids and logprobs of a request from its ``start``-th generated token on; empty for an unknown one.

        Reads lists that the generation thread only appends to. Logprobs come after their token, so they say
        how many are there.
        """
        scheduler = self._processor.scheduler
        state = scheduler.active_requests.get(key) or scheduler.waiting_requests.get(key)
        if state is None:  # not yet drained from the queue, or on its way back to the waiting ones
            return [], []
        logprobs: list[float] = state.logprobs[start:]
        # A request that was put back for want of cache carries what it had generated in its prompt.
        before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
        if start >= before:
            ids: list[int] = state.generated_tokens[start - before :]
        else:
            ids = (state.initial_tokens[state._true_initial_tokens :] + state.generated_tokens)[start:]
        return ids[: len(logprobs)], logprobs

    # ----------------------------------------------------------------------------------------------- load

    def running(self) -> int:
        """Requests that hold cache: in prefill or decoding."""
        return len(self._processor.scheduler.active_requests)

    def kv(self) -> tuple[int, int]:
        """Tokens of cache in use by requests, and in all. What is only kept for reuse counts as free."""
        cache = self._processor.cache
        total = cache.num_blocks * self._manager.continuous_batching_config.page_size
        size = cache.num_sectors * cache.bytes_per_sector
        allocators = cache.cache_allocators.values()
        kept = sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in allocators) / size
        return max(0, round(total * (1 - cache.compute_free_capacity() - kept))), total

    # -------------------------------------------------------------------------------------------- control

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The loop at rest, with no request in it and an empty cache.

        Raises
        ------
        RuntimeError
            The loop has ended, or holds requests.
        """
        with self._manager.pause():
            if self._processor.has_pending_requests():
                raise RuntimeError("the generation loop still holds requests")
            self._processor.cache.reset()
            yield

    def thread(self) -> threading.Thread | None:
        """The generation thread; None once it was stopped."""
        thread: threading.Thread | None = self._manager._generation_thread
        return thread

    def why_ended(self) -> str:
        """What ended the loop, as one line; empty if it was asked to stop."""
        error = self._manager.background_thread_status.fatal_error
        return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def stop(self, timeout: float) -> bool:
        """Stop after the step that runs now, waiting at most ``timeout`` seconds. Whether it has ended."""
        self._manager.stop(timeout=timeout, hard_stop=True)
        return self.thread() is None


def wall_clock(timestamp: float) -> float:
    """``time.time()`` of a ``time.perf_counter()`` value, which is what the library records."""
    return time.time() - (time.perf_counter() - timestamp)
