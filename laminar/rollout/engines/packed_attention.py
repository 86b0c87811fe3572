"""Attention for continuous batching that reads each request's own keys and no others.

The library's ``sdpa`` and ``paged|eager`` attention put a whole batch into one row and mask everything that
belongs to somebody else, so that a decode step of B requests computes B times the scores it needs and fills a
mask of (batch tokens, cache tokens). Here the decoding requests become a padded batch, and each prefill is
computed by itself. On one CPU core and with the model of ``flows/`` that is more than twice the tokens per second
at 128 requests, and 1.4 times at 64.

Registered with the library as ``ATTENTION``; the name holds "flash" because the library takes that as the
sign of an attention that needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

__all__ = ["ATTENTION", "length_groups", "packed_attention", "supports"]

ATTENTION = "laminar_packed_flash"

_PLAN = "laminar_plan"


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Requests with one query token and similar lengths: ``b`` of them, padded to ``length`` keys.

    ``queries``: their positions in the packed row, shape (b,); ``rows``: their rows in the cache, shape
    (b * length,); ``mask``: True where there is a key, shape (b, 1, 1, length).
    """

    queries: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor
    length: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request with queries ``begin`` to ``end`` of the packed row. ``rows``: its rows in the cache, shape
    (keys,); None where all keys are those of the queries."""

    begin: int
    end: int
    rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    decodes: list[_Decodes]
    prefills: list[_Prefill]


def supports(config: Any) -> bool:
    """Whether every layer of a model is full attention, by its ``PretrainedConfig``: no window is applied."""
    return set(group_layers_by_attn_type(config)) == {"full_attention"}


def length_groups(lengths: list[int], *, small: int = 4096) -> list[list[int]]:
    """Which requests share a padded batch: those whose lengths lie within a factor of two.

    So at most half of a batch is padding, however long the longest request is. A batch that is small even
    when padded to its longest stays one, as a group has a price too.

    Parameters
    ----------
    lengths
        Keys of each request, at least 1.
    small
        Padded size in keys up to which there is one group.

    Example
    -------
    >>> length_groups([30, 900, 25, 31], small=100)
    [[0, 2, 3], [1]]
    >>> length_groups([30, 900, 25, 31])
    [[0, 1, 2, 3]]
    """
    if len(lengths) * max(lengths, default=0) <= small:
        return [list(range(len(lengths)))]
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(index)
    return list(groups.values())


def _plan(queries: list[int], keys: list[int], read_index: torch.Tensor) -> _Plan:
    """What to compute for a batch; the same for all of its layers.

    Parameters
    ----------
    queries, keys
        Cumulative lengths, starting with 0. ``keys`` counts cached and new ones.
    read_index
        Cache row of each key, shape (keys[-1],); empty where nothing was cached before this batch.
    """
    cached = read_index.numel() > 0
    requests = list(zip(queries, queries[1:], keys, keys[1:], strict=False))
    single = [(q, k, k_end - k) for q, q_end, k, k_end in requests if cached and q_end - q == 1]
    prefills = [
        _Prefill(q, q_end, read_index[k:k_end] if cached else None)
        for q, q_end, k, k_end in requests
        if not cached or q_end - q > 1
    ]
    decodes = []
    for group in length_groups([length for _, _, length in single]) if single else []:
        device = read_index.device
        position, start, length = torch.tensor([single[index] for index in group], device=device).unbind(1)
        longest = max(single[index][2] for index in group)
        offset = torch.arange(longest, device=device)
        rows = read_index[(start[:, None] + offset).clamp_(max=keys[-1] - 1)]
        mask = (offset < length[:, None])[:, None, None, :]
        decodes.append(_Decodes(position, rows.reshape(-1), mask, longest))
    return _Plan(decodes, prefills)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **batch: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to the paged cache and attend to it, request by request.

    Parameters
    ----------
    query, key, value
        Shapes (1, heads, tokens, head size) and twice (1, key heads, tokens, head size): all requests in one
        row.
    batch
        ``cache`` (``PagedAttentionCache``) and what the library prepares for a batch: ``cu_seq_lens_q``,
        ``cu_seq_lens_k``, ``read_index``, ``write_index``.

    Returns
    -------
    The attention's output, shape (1, tokens, heads, head size), and None in place of weights.
    """
    layer: Any = module.layer_idx
    allocator = batch["cache"].layer_to_allocator[layer]
    key_cache, value_cache = allocator._kv_token_views[layer]
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # (tokens, key heads, head size)
    write_index = batch["write_index"][allocator.index]
    key_cache.index_copy_(0, write_index, key)
    value_cache.index_copy_(0, write_index, value)

    shared: dict[str, Any] = batch["cu_seq_lens_k"]  # one dict a batch, handed to every layer of it
    if _PLAN not in shared:
        keys = shared[allocator.layer_type].tolist()
        shared[_PLAN] = _plan(batch["cu_seq_lens_q"].tolist(), keys, batch["read_index"][allocator.index])
    plan: _Plan = shared[_PLAN]

    query = query[0].transpose(0, 1)  # (tokens, heads, head size)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for decodes in plan.decodes:
        output[decodes.queries] = _decode(query[decodes.queries], key_cache, value_cache, decodes, scaling)
    for prefill in plan.prefills:
        new = slice(prefill.begin, prefill.end)
        if prefill.rows is None:
            output[new] = _prefill(query[new], key[new], value[new], scaling)
        else:
            cached_key, cached_value = key_cache[prefill.rows], value_cache[prefill.rows]
            output[new] = _prefill(query[new], cached_key, cached_value, scaling)
    return output[None], None


def _decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    decodes: _Decodes,
    scaling: float | None,
) -> torch.Tensor:
    """Shapes (b, heads, head size) in and out. The query heads that share a key head are its query rows, so
    that keys are not repeated."""
    b, heads, size = query.shape
    shape = (b, decodes.length, key_cache.shape[1], size)
    key = key_cache.index_select(0, decodes.rows).view(shape).transpose(1, 2)
    value = value_cache.index_select(0, decodes.rows).view(shape).transpose(1, 2)
    grouped = query.view(b, key_cache.shape[1], -1, size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=decodes.mask, scale=scaling)
    return out.reshape(b, heads, size)


def _prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Shapes (queries, heads, head size) and twice (keys, key heads, head size); the queries are the last."""
    new, total = query.shape[0], key.shape[0]
    mask = None
    if new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril_(total - new)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(ATTENTION, packed_attention)
