"""Rows of the experience table as arrays, checked before anything is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Sample", "rewards_of", "samples_of", "staleness_of", "unscored"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: what the model saw, what it answered, and how each answer token counts.

    ``response_ids``, ``logprobs`` (the engine's) and ``loss_mask`` have one entry a token of the response.
    """

    prompt_ids: npt.NDArray[np.int64]
    response_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.bool_]
    advantage: float

    @property
    def length(self) -> int:
        """Tokens of the row, prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def loss_tokens(self) -> int:
        """Tokens of the response that the loss counts."""
        return int(self.loss_mask.sum())


def unscored(prompt: Sequence[int], response: Sequence[int]) -> Sample:
    """A row of which all response tokens count, without what only training needs."""
    return Sample(
        np.asarray(prompt, np.int64),
        np.asarray(response, np.int64),
        np.zeros(len(response), np.float32),
        np.ones(len(response), np.bool_),
        0.0,
    )


def rewards_of(rows: pa.Table) -> npt.NDArray[np.float64]:
    """Rewards, ``[rows]``; ``ValueError`` if one is missing or there is no row."""
    if rows.num_rows == 0:
        raise ValueError("a step was given no rows; expected at least one complete group")
    missing = rows["reward"].null_count
    if missing:
        raise ValueError(f"{missing} of {rows.num_rows} rows have no reward; only scored rows can be trained")
    return np.asarray(rows["reward"].to_numpy(), dtype=np.float64)


def staleness_of(rows: pa.Table, version: int, ceiling: int | None) -> npt.NDArray[np.int64]:
    """Versions that each row is behind; neither from the future nor above the ceiling."""
    staleness = version - np.asarray(rows["weight_version"].to_numpy(), dtype=np.int64)
    if rows.num_rows and staleness.min() < 0:
        raise ValueError(f"a row of weight version {version - staleness.min()} cannot train version {version}")
    if rows.num_rows and ceiling is not None and staleness.max() > ceiling:
        raise ValueError(f"a row {staleness.max()} versions behind, over the staleness ceiling of {ceiling}")
    return staleness


def samples_of(rows: pa.Table, advantages: Sequence[float] | npt.NDArray[np.float64]) -> list[Sample]:
    """Rows of the experience table as arrays, without a copy of their tokens where none is needed.

    Raises ``ValueError`` naming the trajectory whose columns do not fit together.
    """
    prompts = _lists(rows["prompt_ids"], np.int64)
    responses = _lists(rows["response_ids"], np.int64)
    logprobs = _lists(rows["logprobs"], np.float32)
    masks = _lists(rows["loss_mask"], np.bool_)
    names = rows["trajectory_id"].to_pylist() if "trajectory_id" in rows.column_names else range(rows.num_rows)
    samples = []
    columns = zip(names, prompts, responses, logprobs, masks, advantages, strict=True)
    for name, prompt, response, logprob, mask, advantage in columns:
        if len(prompt) == 0 or not len(response) == len(logprob) == len(mask):
            raise ValueError(
                f"trajectory {name}: {len(prompt)} prompt tokens, {len(response)} response tokens, "
                f"{len(logprob)} logprobs, {len(mask)} mask entries; expected a prompt, and the others equal"
            )
        samples.append(Sample(prompt, response, logprob, mask, float(advantage)))
    return samples


def _lists(column: pa.ChunkedArray, dtype: npt.DTypeLike) -> list[npt.NDArray[np.generic]]:
    """A list column as one array a row, views of one buffer."""
    array = column.combine_chunks()
    values = array.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return [values[start:end] for start, end in pairwise(array.offsets.to_numpy())]
