"""The row of a finished trajectory fits the experience table, however it ended."""

from __future__ import annotations

import itertools

import pytest

from laminar.experience.schema import record_batch, row
from laminar.rollout.engine import Generated
from laminar.rollout.rows import Story, row_of
from laminar.trajectory import Prompt, Sampling, Score, TrajectoryRequest

REQUEST = TrajectoryRequest("run", "g000001", 2, 4, Prompt("p-1", "1 + 1 ="), (5, 6), Sampling(0.7), "sums")
SCORES = {
    "ok": Score(0.5, {"format": 1.0}),
    "skipped": Score(None, status="skipped"),
    "error": Score(None, status="error", message="no such key"),
    "timeout": Score(None, status="timeout"),
}


@pytest.mark.parametrize(
    ("reason", "ids", "score"), list(itertools.product(["stop", "length", "abort", "error"], [[7, 1], []], SCORES))
)
def test_a_row_has_a_reward_or_a_reason_for_none(reason: str, ids: list[int], score: str) -> None:
    generated = Generated("g000001-2", ids, [-0.5] * len(ids), reason, message="" if ids else "out of memory")
    made = row_of(REQUEST, generated, SCORES[score], Story(weight_version=3, finish_version=4), text="2")
    [kept] = record_batch([row(**made)]).to_pylist()
    if reason in ("abort", "error") or not ids:
        assert (kept["reward"], kept["drop_reason"]) == (None, "generation_error")
    elif score == "ok":
        assert (kept["reward"], kept["drop_reason"]) == (0.5, None), "a cut answer is scored like any other"
    else:
        assert (kept["reward"], kept["drop_reason"]) == (None, f"reward_{score}")
    assert kept["message"] == (generated.message or SCORES[score].message)
    assert kept["response_ids"] == ids and kept["loss_mask"] == [1] * len(ids)
    assert (kept["trajectory_id"], kept["sample"], kept["group_size"]) == ("g000001-2", 2, 4)
    assert kept["temperature"] == pytest.approx(0.7)
