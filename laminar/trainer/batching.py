"""Rows put together into micro-batches of padded tensors.

A micro-batch is padded on the right. A causal model never looks at what follows a token, so real tokens come
out the same whatever padding follows, and neither an attention mask nor position ids have to be built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laminar.trainer.rows import Sample

__all__ = ["MicroBatch", "collate", "microbatches", "split_by_tokens"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows, and the flat list of the tokens that count.

    Parameters
    ----------
    input_ids
        ``[rows, width]``, padded on the right.
    row, position
        ``[tokens]``: token ``input_ids[row, position]``; its logprob is in the logits at ``position - 1``.
    logprobs, advantages
        ``[tokens]``: the engine's logprob of the token, and the advantage of its row.
    """

    input_ids: Tensor
    row: Tensor
    position: Tensor
    logprobs: Tensor
    advantages: Tensor

    @property
    def tokens(self) -> int:
        """How many tokens count."""
        return self.row.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which rows go into which micro-batch, so that rows x longest row stays within the budget.

    Longest rows first, so that rows of like length meet and little is padding. A row longer than the budget
    goes alone. The same lengths always give the same split.

    Parameters
    ----------
    lengths
        Tokens of each row.
    budget
        Padded tokens of a micro-batch.

    Example
    -------
    >>> split_by_tokens([3, 9, 4, 4, 20], budget=12)
    [[4], [1], [2, 3, 0]]
    """
    split: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if split and (len(split[-1]) + 1) * longest <= budget:
            split[-1].append(index)
        else:
            split.append([index])
            longest = lengths[index]
    return split


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Pad rows to one width and list their tokens that count.

    Example
    -------
    >>> ids = lambda *values: np.array(values, np.int64)
    >>> row = Sample(ids(7, 8), ids(5, 6), np.array([-0.1, -0.2], np.float32), np.array([True, True]), 1.0)
    >>> short = Sample(ids(7), ids(9), np.array([-0.3], np.float32), np.array([True]), -1.0)
    >>> batch = collate([row, short])
    >>> batch.input_ids.tolist(), batch.row.tolist(), batch.position.tolist()
    ([[7, 8, 5, 6], [7, 9, 0, 0]], [0, 0, 1], [2, 3, 1])
    """
    input_ids = np.zeros((len(samples), max(sample.length for sample in samples)), np.int64)
    row, position, logprobs, advantages = [], [], [], []
    for index, sample in enumerate(samples):
        input_ids[index, : sample.length] = np.concatenate([sample.prompt_ids, sample.response_ids])
        counted = np.flatnonzero(sample.loss_mask)
        row.append(np.full(len(counted), index))
        position.append(len(sample.prompt_ids) + counted)
        logprobs.append(sample.logprobs[counted])
        advantages.append(np.full(len(counted), sample.advantage, np.float32))
    return MicroBatch(
        torch.from_numpy(input_ids),
        *(torch.from_numpy(np.concatenate(parts)) for parts in (row, position, logprobs, advantages)),
    )


def microbatches(samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
    """Micro-batches of all rows that have a token which counts; ``budget`` in padded tokens."""
    counted = [sample for sample in samples if sample.loss_tokens]
    split = split_by_tokens([sample.length for sample in counted], budget)
    return [collate([counted[index] for index in indices]) for indices in split]
