"""Rows for tests: small, complete, and recognisable by their tokens; and leases of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from laminar.experience.schema import record_batch, row
from laminar.experience.table import ExperienceTable, Lease

__all__ = ["batch", "group", "ids", "lease", "one"]


def one(group: str, sample: int, *, size: int = 2, version: int = 0, tokens: int = 3, **more: Any) -> dict[str, Any]:
    """One scored row; give ``drop_reason`` for one that is not."""
    values: dict[str, Any] = {
        "trajectory_id": f"{group}-{sample}",
        "group_id": group,
        "prompt_id": f"prompt-of-{group}",
        "sample": sample,
        "group_size": size,
        "weight_version": version,
        "finish_version": version,
        "prompt_ids": [1, 2],
        "response_ids": [10 + sample] * tokens,
        "logprobs": [-0.5] * tokens,
        "reward": None if "drop_reason" in more else float(sample),
        "finish_reason": "stop",
    }
    return row(**{**values, **more})


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    """Rows as what is appended."""
    return record_batch(rows)


def group(name: str, *, size: int = 2, samples: Iterable[int] | None = None, **more: Any) -> pa.RecordBatch:
    """A whole group, or some samples of it."""
    chosen = range(size) if samples is None else samples
    return batch(*(one(name, sample, size=size, **more) for sample in chosen))


def lease(table: ExperienceTable, groups: int = 1, version: int = 0, ceiling: int | None = None) -> Lease:
    """What is leased; there must be so much."""
    found = table.lease(groups, version=version, staleness_ceiling=ceiling, lessee="trainer")
    assert found is not None
    return found


def ids(lease: Lease) -> list[str]:
    """Its trajectories."""
    return list(lease.table["trajectory_id"].to_pylist())
