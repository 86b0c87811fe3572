"""What the experience table keeps of a trajectory, column by column, and of its life."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

__all__ = ["COLUMNS", "DROP_REASONS", "LIFE_SCHEMA", "SCHEMA", "Column", "record_batch", "row"]

DROP_REASONS: Final = ("reward_skipped", "reward_error", "reward_timeout", "generation_error")
"""Why a row may have no reward. Such a row counts for its group's completeness and is never trained."""

_REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, what it means, and its value where the writer gives none."""

    name: str
    type: pa.DataType
    doc: str
    default: Any = _REQUIRED


_ints, _longs, _floats = pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.float32())

COLUMNS: Final[tuple[Column, ...]] = (
    Column("trajectory_id", pa.string(), "`<group>-<sample>`, unique in the table"),
    Column("group_id", pa.string(), "one prompt drawn once; advantages are taken within it"),
    Column("prompt_id", pa.string(), "the prompt's name in its environment"),
    Column("sample", pa.int32(), "0-based number within the group"),
    Column("group_size", pa.int32(), "samples in the group; it is complete when all of them are appended"),
    Column("weight_version", pa.int64(), "version of the weights that generated the first token"),
    Column(
        "finish_version",
        pa.int64(),
        "newest version on the host when the last token came; less `weight_version`: the staleness it was born with",
    ),
    Column("prompt_ids", _ints, "token ids the engine was given"),
    Column("response_ids", _ints, "token ids the engine gave back, stop token included"),
    Column("logprobs", _floats, "of each response token, of the distribution it was drawn from (natural log)"),
    Column(
        "loss_mask",
        pa.list_(pa.int8()),
        "1 where a response token is the policy's own, 0 where an environment's",
    ),
    Column("token_versions", _longs, "weight version of each response token; partial schedule only", None),
    Column("reward", pa.float32(), "what the environment gave; null if the row was dropped", None),
    Column("reward_parts", pa.map_(pa.string(), pa.float32()), "named parts of the reward", None),
    Column("finish_reason", pa.string(), "stop | length | abort | error"),
    Column("drop_reason", pa.string(), f"null, or why there is no reward: {' | '.join(DROP_REASONS)}", None),
    Column("message", pa.string(), "one line about a drop or an error", ""),
    Column("turns", pa.int32(), "model turns", 1),
    Column("prompt_text", pa.string(), "the prompt for people; never encoded again", ""),
    Column("response_text", pa.string(), "the response for people; never encoded again", ""),
    Column("queued_at", pa.float64(), "unix time in seconds: drawn from the prompt pool", 0.0),
    Column("started_at", pa.float64(), "unix time in seconds: given to an engine", 0.0),
    Column("first_token_at", pa.float64(), "unix time in seconds: first response token", 0.0),
    Column("finished_at", pa.float64(), "unix time in seconds: scored", 0.0),
    Column("environment_seconds", pa.float64(), "seconds spent in tools and scoring", 0.0),
    Column("replica", pa.string(), "the replica that finished it", ""),
    Column("migrations", pa.int32(), "how often it moved between replicas", 0),
    Column("temperature", pa.float32(), "at which its tokens were drawn", 1.0),
    Column("attempt_run_id", pa.int64(), "Dask's run id of the attempt that finished it", 0),
)

SCHEMA: Final = pa.schema([pa.field(column.name, column.type) for column in COLUMNS])

LIFE_SCHEMA: Final = pa.schema(
    [
        pa.field("trajectory_id", pa.string()),
        pa.field("state", pa.string()),  # ready | trained | evicted; leases live in the owner's memory only
        pa.field("step", pa.int64()),  # optimizer step that trained it
        pa.field("version", pa.int64()),  # weight version that this step updated
        pa.field("reason", pa.string()),  # of an eviction
        pa.field("seq", pa.int64()),  # the highest one of a trajectory is its state now
    ]
)

_BY_NAME = {column.name: column for column in COLUMNS}


def row(**values: Any) -> dict[str, Any]:
    """Complete the values of one row with the columns' defaults, and check them.

    ``loss_mask`` is all ones where it is not given. Sequences may be lists, tuples or numpy arrays.

    Raises
    ------
    ValueError
        An unknown or missing column, token columns of unequal length, an unknown ``drop_reason``, or a
        reward where there is a reason for none (and the other way round).

    Example
    -------
    >>> ids = dict(trajectory_id="g000000-0", group_id="g000000", prompt_id="sum-1", sample=0, group_size=1)
    >>> one = row(**ids, weight_version=0, finish_version=0, prompt_ids=[5], response_ids=[7, 2],
    ...           logprobs=[-0.1, -0.7], reward=1.0, finish_reason="stop")
    >>> one["loss_mask"], one["turns"], one["drop_reason"]
    ([1, 1], 1, None)
    """
    if unknown := values.keys() - _BY_NAME.keys():
        name = min(unknown)
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        raise ValueError(f"unknown column {name!r}{f', did you mean {near[0]!r}?' if near else ''}")
    if "loss_mask" not in values and "response_ids" in values:
        values["loss_mask"] = [1] * len(values["response_ids"])
    full = {column.name: values.get(column.name, column.default) for column in COLUMNS}
    if missing := [name for name, value in full.items() if value is _REQUIRED]:
        raise ValueError(f"a row needs {', '.join(missing)}")
    _check(full)
    return full


def _check(row: Mapping[str, Any]) -> None:
    name, tokens = row["trajectory_id"], len(row["response_ids"])
    for column in ("logprobs", "loss_mask", "token_versions"):
        if row[column] is not None and len(row[column]) != tokens:
            raise ValueError(f"{name}: {len(row[column])} {column} for {tokens} response_ids")
    reason = row["drop_reason"]
    if reason is not None and reason not in DROP_REASONS:
        raise ValueError(f"{name}: drop_reason is {reason!r}, expected one of {', '.join(DROP_REASONS)}")
    if (row["reward"] is None) != (reason is not None):
        raise ValueError(f"{name}: reward is {row['reward']} and drop_reason {reason!r}: give one of the two")


def record_batch(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as made by :func:`row`, as one Arrow batch of ``SCHEMA``."""
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)
