"""Rows for ``bench table``, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from laminar.experience.schema import SCHEMA

__all__ = ["BATCH", "GROUP", "rows", "timed"]

GROUP = 8
BATCH = 64
"""Rows of one append: about what gathers from a few replicas while one append is written."""


def rows(first: int, count: int, tokens: int, seed: int = 0) -> pa.RecordBatch:
    """``count`` whole rows of ``tokens`` response tokens, numbered from ``first`` on, made without a loop."""
    random = np.random.default_rng(seed + first)
    numbers = np.arange(first, first + count)
    offsets = np.arange(count + 1, dtype=np.int32) * tokens
    prompts = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * 64, np.zeros(count * 64, np.int32))
    values: dict[str, Any] = {
        "trajectory_id": [f"g{n // GROUP:07d}-{n % GROUP}" for n in numbers],
        "group_id": [f"g{n // GROUP:07d}" for n in numbers],
        "prompt_id": [f"p{n // GROUP}" for n in numbers],
        "sample": numbers % GROUP,
        "group_size": np.full(count, GROUP),
        "weight_version": numbers // 10_000,
        "finish_version": numbers // 10_000,
        "prompt_ids": prompts,
        "response_ids": pa.ListArray.from_arrays(offsets, random.integers(0, 150_000, count * tokens, np.int32)),
        "logprobs": pa.ListArray.from_arrays(offsets, -random.random(count * tokens, np.float32)),
        "loss_mask": pa.ListArray.from_arrays(offsets, np.ones(count * tokens, np.int8)),
        "reward": random.integers(0, 2, count),
        "finish_reason": ["stop"] * count,
        "finished_at": numbers.astype(np.float64),
    }
    columns = [
        pa.array(values[field.name]).cast(field.type) if field.name in values else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
