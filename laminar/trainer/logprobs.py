"""Logprobs of tokens that were drawn, without the logits of a whole batch at once.

Logits are by far the largest thing that a step makes: at a vocabulary of 152k, those of 8192 tokens take 5 GB in
float32, and a softmax with its gradient several times that. So they are made for some tokens at a time, and made
again for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from laminar.trainer.batching import MicroBatch

__all__ = ["LOGITS_AT_ONCE", "Head"]

LOGITS_AT_ONCE = 1 << 26
"""Numbers; a float32 tensor of them takes 256 MB."""


class Head:
    """The way from a model's last hidden states to the logprobs of drawn tokens.

    Most models end in one matrix. Some do something to the logits after it (soft caps, scales): theirs are made
    by the model itself, in its own precision, and only what follows is done in parts.

    Parameters
    ----------
    model
        A causal language model of ``transformers``. Whether it ends in one matrix is tried with two tokens.
    at_once
        Logits held at once: tokens x vocabulary.
    """

    def __init__(self, model: Any, *, at_once: int = LOGITS_AT_ONCE) -> None:
        self.model = model
        self.matrix = _last_matrix(model)
        vocabulary: int = model.get_input_embeddings().num_embeddings
        self.tokens_at_once = max(1, at_once // vocabulary)

    def token_logprobs(
        self, batch: MicroBatch, *, temperature: float, dtype: torch.dtype, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each token that counts, and the entropy of the distribution it was drawn from.

        Both are of the distribution sampled from: ``log_softmax(logits / temperature)``, in float32. Of a model that
        ends in one matrix, only the logits that are needed are made.

        Parameters
        ----------
        temperature
            Of the sampling, > 0.
        dtype
            Type that matrix products are computed in.
        entropy_gradient
            Whether the entropy carries a gradient; without, it costs no memory.

        Returns
        -------
        Logprobs and entropy, each ``[tokens]``, in nats.
        """
        with _autocast(batch.input_ids.device, dtype):
            features = self._features(batch)
            drawn = batch.input_ids[batch.row, batch.position]

            def some(features: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
                logits = features if self.matrix is None else self.matrix(features)
                return _of_logits(logits.float() / temperature, drawn, entropy_gradient)

            if len(drawn) <= self.tokens_at_once:
                return some(features, drawn)
            parts = [
                checkpoint(some, *part, use_reentrant=False, preserve_rng_state=False)
                for part in zip(*(torch.split(each, self.tokens_at_once) for each in (features, drawn)), strict=True)
            ]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def _features(self, batch: MicroBatch) -> Tensor:
        """What the next token's logits are made of: hidden states, ``[tokens, size]``, or the logits themselves."""
        if self.matrix is not None:
            hidden = self.model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            return hidden[batch.row, batch.position - 1]  # type: ignore[no-any-return]
        first = int(batch.position.min()) - 1
        keep = batch.input_ids.shape[1] - first
        logits = self.model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=keep).logits
        return logits[batch.row, batch.position - 1 - first]  # type: ignore[no-any-return]


def _of_logits(logits: Tensor, drawn: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    log_probs = logits.log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, drawn[:, None])[:, 0], entropy


@torch.no_grad()
def _last_matrix(model: Any) -> Callable[[Tensor], Tensor] | None:
    """The output matrix, if the model's logits are just what it gives; else None.

    Two tokens are sent through the model with large made-up logits in the place of the matrix's, so that whatever
    is done to them shows.
    """
    matrix: Any = model.get_output_embeddings()
    if matrix is None or model.base_model is model:
        return None
    ids = torch.tensor([[1, 2]], device=model.device)
    seen: list[tuple[Tensor, Tensor]] = []

    def instead(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        made_up = torch.linspace(-1e3, 1e3, output.numel(), device=output.device).view_as(output).to(output.dtype)
        seen.append((inputs[0], made_up))
        return made_up

    hook = matrix.register_forward_hook(instead)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    if len(seen) != 1 or not torch.equal(logits, seen[0][1]):
        return None
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return matrix if torch.allclose(hidden, seen[0][0], rtol=1e-4, atol=1e-5) else None


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
