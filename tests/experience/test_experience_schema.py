"""The row: complete, checked, and documented."""

from __future__ import annotations

import numpy as np
import pytest

from laminar.experience.schema import COLUMNS, SCHEMA, record_batch
from tests.experience.rows import one


def test_every_column_says_what_it_means() -> None:
    assert all(column.doc for column in COLUMNS)
    assert SCHEMA.names == [column.name for column in COLUMNS]


def test_an_unknown_column_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="unknown column 'rewards', did you mean 'reward'"):
        one("g0", 0, rewards=1.0)


def test_a_missing_column_is_named() -> None:
    from laminar.experience.schema import row

    with pytest.raises(ValueError, match="a row needs group_id, prompt_id"):
        row(trajectory_id="g0-0", response_ids=[])


@pytest.mark.parametrize("column", ["logprobs", "loss_mask", "token_versions"])
def test_token_columns_of_unequal_length_are_refused(column: str) -> None:
    with pytest.raises(ValueError, match=f"g0-0: 2 {column} for 3 response_ids"):
        one("g0", 0, tokens=3, **{column: [1, 1]})


@pytest.mark.parametrize("more", [{"reward": None}, {"drop_reason": "reward_error", "reward": 0.0}])
def test_a_row_has_either_a_reward_or_a_reason_for_none(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        one("g0", 0, **more)


def test_an_unknown_drop_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="'bored', expected one of reward_skipped"):
        one("g0", 0, drop_reason="bored")


def test_lists_arrays_and_reward_parts_round_trip() -> None:
    row = one(
        "g0",
        1,
        tokens=2,
        response_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        reward_parts={"format": 0.5},
    )
    back = record_batch([row]).to_pylist()[0]
    assert back["response_ids"] == [7, 8]
    assert back["logprobs"] == [-0.5, -0.25]
    assert back["loss_mask"] == [1, 1]
    assert back["reward_parts"] == [("format", 0.5)]
    assert back["token_versions"] is None
