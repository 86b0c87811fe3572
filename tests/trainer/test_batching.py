from __future__ import annotations

from itertools import chain

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.trainer.batching import microbatches, split_by_tokens
from laminar.trainer.rows import samples_of
from tests.trainer.micro import rows


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 400))
def test_every_row_is_in_one_micro_batch_and_each_within_the_budget_or_alone(lengths, budget):
    split = split_by_tokens(lengths, budget)
    assert sorted(chain.from_iterable(split)) == list(range(len(lengths)))
    for part in split:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget
    assert split == split_by_tokens(lengths, budget)


def test_tokens_survive_the_way_into_a_batch_and_masked_ones_do_not_count():
    table = rows((2, 2))
    masks = [[i % 2 for i in range(len(ids))] for ids in table["response_ids"].to_pylist()]
    table = table.set_column(table.column_names.index("loss_mask"), "loss_mask", pa.array(masks, pa.list_(pa.int8())))
    [batch] = microbatches(samples_of(table, [1.0, 2.0, 3.0, 4.0]), 10_000)
    seen = {}
    for token, logprob, advantage in zip(
        batch.input_ids[batch.row, batch.position].tolist(),
        batch.logprobs.tolist(),
        batch.advantages.tolist(),
        strict=True,
    ):
        seen.setdefault(advantage, []).append((token, logprob))
    for index, row in enumerate(table.to_pylist()):
        counted = [
            (token, pytest.approx(logprob))
            for token, logprob, keep in zip(row["response_ids"], row["logprobs"], row["loss_mask"], strict=True)
            if keep
        ]
        assert seen.get(float(index + 1), []) == counted


def test_rows_of_a_sliced_table_keep_their_own_tokens():
    table = rows((4, 4))
    whole = samples_of(table, [0.0] * 8)
    part = samples_of(table.slice(3, 2), [0.0] * 2)
    assert [s.response_ids.tolist() for s in part] == [s.response_ids.tolist() for s in whole[3:5]]


def test_columns_that_do_not_fit_name_the_trajectory():
    table = rows((2,))
    short = pa.array([[-1.0]] * 2, pa.list_(pa.float32()))
    broken = table.set_column(table.column_names.index("logprobs"), "logprobs", short)
    with pytest.raises(ValueError, match=r"trajectory g0-\d: .* 1 logprobs"):
        samples_of(broken, [0.0, 0.0])
