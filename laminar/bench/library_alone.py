"""The engine library with nothing of ours around it, in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from laminar.trajectory import Sampling

__all__ = ["LibraryAlone"]

DEADLINE = 600.0


class LibraryAlone:
    """``transformers``' continuous batching in a child process on one thread.

    Parameters
    ----------
    model
        Checkpoint folder.
    kv_tokens
        Size of the KV cache in tokens.
    slots
        Most requests in a batch.
    """

    def __init__(self, model: str, *, kv_tokens: int, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, kv_tokens, slots), daemon=True)

    def __enter__(self) -> Self:
        self.process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipe.close()
        self.process.join(timeout=20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=5)

    def measure(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> float:
        """Tokens/s over one round of prompts, all handed over at once."""
        self.pipe.send((prompts, sampling))
        if not self.pipe.poll(DEADLINE):
            raise TimeoutError(f"the library alone did not answer {len(prompts)} prompts in {DEADLINE:.0f} s")
        return float(self.pipe.recv())


def _serve(pipe: Connection, model_path: str, kv_tokens: int, slots: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(1)
    from laminar.rollout.engines.packed_attention import ATTENTION

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.config._attn_implementation = ATTENTION  # ours, which is faster: so that only what is around it counts
    page = 16
    config = ContinuousBatchingConfig(
        return_logprobs=True,
        page_size=page,
        num_blocks=kv_tokens // page,
        max_batch_tokens=1024,
        max_requests_per_batch=slots,
        allow_block_sharing=True,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    generation = GenerationConfig(
        do_sample=True, temperature=0.99, max_new_tokens=1, eos_token_id=model.generation_config.eos_token_id
    )
    with torch.no_grad():
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        manager.start()
        try:
            while True:
                try:
                    prompts, sampling = pipe.recv()
                except EOFError:
                    return
                pipe.send(_round(manager, prompts, sampling))
        finally:
            manager.stop(block=True, timeout=10)


def _round(manager: Any, prompts: Sequence[Sequence[int]], sampling: Sampling) -> float:
    began = time.perf_counter()
    manager.add_requests([list(ids) for ids in prompts], max_new_tokens=sampling.max_new_tokens)
    tokens = finished = 0
    while finished < len(prompts):
        result = manager.get_result(timeout=DEADLINE)
        if result is None:
            raise RuntimeError("the library's generation loop stopped")
        tokens += len(result.generated_tokens)
        finished += 1
    return tokens / (time.perf_counter() - began)
