"""What an engine refuses, and what is over before it begins: the same for every engine. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar.rollout.engine import FinishReason, Generation

if TYPE_CHECKING:
    import torch

__all__ = ["Limits", "already_over", "check_request", "check_weights"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one model and one cache can take.

    Parameters
    ----------
    vocabulary
        Number of token ids, those of the embedding.
    positions
        Longest sequence of the model (``max_position_embeddings``) in tokens; None where there is no such.
    cache
        Longest sequence that the KV cache can hold when it is empty, in tokens.
    """

    vocabulary: int
    positions: int | None
    cache: int


def check_request(generation: Generation, limits: Limits) -> None:
    """Refuse a request that can never be served.

    Raises
    ------
    ValueError
        Says the numbers.

    Example
    -------
    >>> from laminar.trajectory import Sampling
    >>> check_request(Generation("g-0", [1] * 300, Sampling(max_new_tokens=256)), Limits(64, 512, 65536))
    Traceback (most recent call last):
        ...
    ValueError: request g-0: a prompt of 300 tokens and 256 new ones make 556, the model takes 512 \
(max_position_embeddings)
    """
    what, sampling = f"request {generation.id}", generation.sampling
    if not generation.prompt_ids:
        raise ValueError(f"{what}: the prompt is empty")
    ids, logprobs = len(generation.prefix_ids), len(generation.prefix_logprobs)
    if ids != logprobs:
        raise ValueError(f"{what}: {ids} prefix ids, but {logprobs} prefix logprobs")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"{what}: temperature {sampling.temperature} is not 0 or above")
    low = min(*generation.prompt_ids, *generation.prefix_ids, limits.vocabulary)
    high = max(*generation.prompt_ids, *generation.prefix_ids, 0)
    if low < 0 or high >= limits.vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"{what}: token id {wrong} is not within 0 to {limits.vocabulary - 1}")
    prompt, new = len(generation.prompt_ids), sampling.max_new_tokens
    size = f"{what}: a prompt of {prompt} tokens and {new} new ones make {prompt + new}"
    if limits.positions is not None and prompt + new > limits.positions:
        raise ValueError(f"{size}, the model takes {limits.positions} (max_position_embeddings)")
    if prompt + new > limits.cache:
        raise ValueError(f"{size}, the KV cache holds {limits.cache} (kv_tokens)")


def already_over(generation: Generation, eos_ids: AbstractSet[int]) -> FinishReason | None:
    """Why there is nothing to generate: the prefix is a whole answer. None where there is.

    Example
    -------
    >>> from laminar.trajectory import Sampling
    >>> already_over(Generation("g-0", [5], Sampling(max_new_tokens=9), [7, 1], [-0.1, -0.2]), {1})
    'stop'
    >>> already_over(Generation("g-0", [5], Sampling(max_new_tokens=2), [7, 8], [-0.1, -0.2]), {1})
    'length'
    """
    if generation.prefix_ids and generation.prefix_ids[-1] in eos_ids:
        return "stop"
    return "length" if len(generation.prefix_ids) >= generation.sampling.max_new_tokens else None


def check_weights(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights whose names or shapes are not those of the model.

    Raises
    ------
    ValueError
        Says which.
    """
    missing = sorted(parameters.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - parameters.keys())
    if missing or unexpected:
        raise ValueError(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    for name, parameter in parameters.items():
        given, wanted = tuple(tensors[name].shape), tuple(parameter.shape)
        if given != wanted:
            raise ValueError(f"weight {name} has shape {given}, the model's is {wanted}")
