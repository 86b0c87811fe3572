"""The embedded engine: continuous batching by the transformers library, on whatever torch runs on."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as library_logging

from laminar.rollout.engine import Delta, FinishReason, Gauges, Generated, Generation
from laminar.rollout.engines import packed_attention
from laminar.rollout.engines.admission import Limits, already_over, check_request, check_weights
from laminar.rollout.engines.continuous_batching import Batching, Output, wall_clock
from laminar.trajectory import Version

__all__ = ["TransformersEngine"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    generation: Generation
    on_finish: Callable[[Generated], None]
    key: str
    """Its name in the library, never used twice."""
    reported: int = 0
    """New tokens that ``progress`` has returned."""


class TransformersEngine:
    """One model, one generation thread.

    Parameters
    ----------
    model
        Folder of a checkpoint in Hugging Face format. Nothing is fetched.
    dtype
        Of the weights and the cache.
    kv_tokens
        Size of the KV cache in tokens. Requests that do not fit wait; when running ones outgrow it, the
        newest are put back and prefilled again.
    page_size
        Granularity of the cache, and of sharing a prompt's prefix, in tokens.
    max_batch_tokens
        Tokens of one forward pass; a longer prompt is prefilled in pieces.
    max_running
        Requests that decode at once; the others wait.
    seed
        Of the draws. The library seeds the process's torch generator with it.
    threads
        Threads of torch in this process.
    device
        Where the model lives; a GPU if there is one by default.
    attention
        ``"packed"`` (``packed_attention``; falls back to ``"sdpa"`` for models with sliding windows) or the
        library's ``"sdpa"``, whose cost and mask grow with the square of the running requests.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        kv_tokens: int = 65536,
        page_size: int = 16,
        max_batch_tokens: int = 1024,
        max_running: int = 256,
        seed: int = 0,
        threads: int = 1,
        device: str | None = None,
        attention: Literal["packed", "sdpa"] = "packed",
    ) -> None:
        self.version: Version | None = None
        self._path = model
        self._dtype = dtype
        self._threads = threads
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._attention = attention
        self._sizes = {
            "kv_tokens": kv_tokens,
            "page_size": page_size,
            "max_batch_tokens": max_batch_tokens,
            "max_running": max_running,
            "seed": seed,
        }
        self._serial = itertools.count()
        self._lock = threading.Lock()  # guards what follows; never held while a callback or the library waits
        self._requests: dict[str, _Request] = {}  # by id; a request ends when it is taken out of here
        self._state: Literal["new", "serving", "loading", "closing", "dead"] = "new"
        self._why = "not started"
        self._model: Any = None
        self._eos_ids: frozenset[int] = frozenset()
        self._limits: Limits | None = None
        self._batching: Batching | None = None

    # -------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Load the checkpoint and begin to serve. After ``close`` or a fatal error it starts afresh.

        Raises
        ------
        RuntimeError
            It serves already.
        """
        if self.alive():
            raise RuntimeError("the engine serves already; close it before it is started again")
        torch.set_num_threads(self._threads)
        library_logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(self._path, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self._path, config=config, dtype=self._dtype, attn_implementation="sdpa", local_files_only=True
        ).to(self._device)
        if self._attention == "packed" and packed_attention.supports(model.config.get_text_config()):
            model.config._attn_implementation = packed_attention.ATTENTION
        self._model = model.eval()
        self._eos_ids = _eos_ids(model)
        batching = Batching(
            model,
            eos_ids=sorted(self._eos_ids),
            on_output=self._on_output,
            on_cancelled=self._on_cancelled,
            on_end=self._on_end,
            **self._sizes,
        )
        self._limits = Limits(
            vocabulary=model.get_input_embeddings().num_embeddings,
            positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
            cache=batching.capacity,
        )
        self.version = None
        self._batching, self._state, self._why = batching, "serving", ""
        batching.start()

    def alive(self) -> bool:
        """Whether requests are served. False before ``start``, after ``close`` and after a fatal error."""
        return self._state in ("serving", "loading")

    def close(self) -> None:
        """Stop serving; requests still running end with ``abort``. Idempotent, at most 10 s."""
        with self._lock:
            batching = self._batching
            if batching is None:
                return
            if batching.thread() is threading.current_thread():
                raise RuntimeError("close() was called by on_finish, on the thread that it would wait for")
            self._batching, self._state, self._why = None, "closing", "closed"
        if not batching.stop(timeout=8.0):
            logger.warning("the generation thread of %s did not end within 8 s; left behind", self._path)
        self._end_all("abort", "")
        self._state = "dead"

    # ---------------------------------------------------------------------------------------- requests

    def submit(self, generation: Generation, on_finish: Callable[[Generated], None]) -> None:
        """Queue a request.

        ``on_finish`` is called on the generation thread; at once and on this thread where the prefix is
        already a whole answer.

        Raises
        ------
        ValueError
            The request can never be served: the message says the numbers.
        RuntimeError
            The engine serves nothing, or is loading weights.
        """
        if self._limits is not None:
            check_request(generation, self._limits)
            if (reason := already_over(generation, self._eos_ids)) is not None:
                _call(on_finish, _prefix_only(generation, reason, ""))
                return
        key = f"{generation.id}#{next(self._serial)}"
        with self._lock:
            if self._state != "serving" or self._batching is None:
                why = "weights are being loaded" if self._state == "loading" else self._why
                raise RuntimeError(f"request {generation.id} was not taken: {why}")
            if generation.id in self._requests:
                raise ValueError(f"request {generation.id} is running already")
            self._requests[generation.id] = _Request(generation, on_finish, key)
            self._batching.add(
                key,
                [*generation.prompt_ids, *generation.prefix_ids],
                temperature=generation.sampling.temperature,
                max_new_tokens=generation.sampling.max_new_tokens - len(generation.prefix_ids),
            )

    def progress(self) -> list[Delta]:
        """New tokens of all running requests since the last call. ``start`` counts from the head of the
        result, prefix included. Called by one thread at a time."""
        batching = self._batching
        deltas: list[Delta] = []
        if batching is None:
            return deltas
        for request in list(self._requests.values()):
            ids, logprobs = batching.generated(request.key, request.reported)
            if ids:
                start = len(request.generation.prefix_ids) + request.reported
                request.reported += len(ids)
                deltas.append(Delta(request.generation.id, start, ids, logprobs))
        return deltas

    def abort(self, request_id: str) -> None:
        """End a request before the next decode step; unknown or ended ones are left alone.

        ``on_finish`` is called on the generation thread, with ``"abort"`` unless the request had just ended.
        """
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None and self._batching is not None:
                self._batching.cancel(request.key)

    # ----------------------------------------------------------------------------------------- weights

    def load(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy weights into the model, in place, and forget every key and value computed before.

        Raises
        ------
        RuntimeError
            A request is running or waiting, or the engine does not serve.
        ValueError
            The names or shapes are not those of ``weights()``. Nothing was changed.
        """
        with self._lock:
            if self._state != "serving" or self._batching is None:
                raise RuntimeError(f"cannot load version {version}: {self._why or self._state}")
            if self._requests:
                raise RuntimeError(f"cannot load version {version}: {len(self._requests)} requests are running")
            self._state, batching = "loading", self._batching
        try:
            parameters = dict(self._model.named_parameters())
            check_weights(parameters, tensors)
            with batching.paused(), torch.no_grad():
                self.version = None  # until all are copied
                for name, parameter in parameters.items():
                    parameter.copy_(tensors[name])
            self.version = version
        finally:
            with self._lock:
                if self._state == "loading":
                    self._state = "serving"

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters that are served, by name, tied ones once. Not copies."""
        if self._model is None:
            raise RuntimeError("the engine was not started")
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def gauges(self) -> Gauges:
        """Requests that run and wait, and tokens of KV cache; all 0 when nothing is served."""
        batching = self._batching
        if batching is None:
            return Gauges(0, 0, 0, 0)
        running = batching.running()
        used, total = batching.kv()
        return Gauges(running, max(0, len(self._requests) - running), used, total)

    # --------------------------------------------------------------------- on the generation thread

    def _on_output(self, output: Output) -> None:
        if output.error is None:
            self._end(output, None, "")
        elif self._state == "closing":
            self._end(output, "abort", "")
        else:
            self._end(output, "error", output.error)

    def _on_cancelled(self, output: Output) -> None:
        self._end(output, "abort", "")

    def _on_end(self) -> None:
        batching = self._batching
        with self._lock:
            if self._state == "closing":
                return  # close() ends what is left
            self._why = f"the generation loop has ended: {batching.why_ended() if batching else ''}"
            self._state = "dead"
        self._end_all("error", self._why)

    # ------------------------------------------------------------------------------------------- rules

    def _end(self, output: Output, reason: FinishReason | None, message: str) -> None:
        request_id = output.request_id.rpartition("#")[0]
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.key != output.request_id:
                return  # close() gave up on a thread, and it went on
            del self._requests[request_id]
        generation = request.generation
        logprobs = [*generation.prefix_logprobs, *output.logprobs]
        ids = [*generation.prefix_ids, *output.generated_tokens][: len(logprobs)]
        if reason is None:
            reason = "stop" if ids[-1] in self._eos_ids else "length"
        first = wall_clock(output.timestamps[0]) if output.timestamps else 0.0
        _call(request.on_finish, Generated(generation.id, ids, logprobs, reason, first, message))

    def _end_all(self, reason: FinishReason, message: str) -> None:
        """End what the library dropped without a word: it does so for requests that it had just taken."""
        with self._lock:
            requests, self._requests = self._requests, {}
        for request in requests.values():
            _call(request.on_finish, _prefix_only(request.generation, reason, message))


def _prefix_only(generation: Generation, reason: FinishReason, message: str) -> Generated:
    ids, logprobs = list(generation.prefix_ids), list(generation.prefix_logprobs)
    return Generated(generation.id, ids, logprobs, reason, message=message)


def _call(on_finish: Callable[[Generated], None], generated: Generated) -> None:
    try:
        on_finish(generated)
    except Exception:  # a caller's bug must not end the other callers' requests
        logger.exception("on_finish of request %s raised", generated.id)


def _eos_ids(model: Any) -> frozenset[int]:
    """Every id that ends an answer: of the generation config (an int or several), else of the model's."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
