"""The rules of the experience table in a real run: sampling, dynamic sampling, and data that ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.experience.reader import Experience
from tests.live import ROOT, laminar_flow

FLOW = """
import laminar as lm

@lm.flow
def ending():
    return lm.post_train(
        model={model!r},
        environment=lm.reasoning_gym("chain_sum", size=24, seed=3, min_terms=2, max_terms=6, max_digits=2),
        algorithm=lm.GRPO(group_size=4),
        rollouts=lm.Rollouts(replicas=1, max_new_tokens=96, kv_tokens=16384),
        sampling=lm.priority("weight_version"),
        dynamic_sampling=True,
        epochs=2,
        steps=100,
        batch_size=16,
        prompt_priority=lambda prompt: -len(prompt.text),
    )
"""


@pytest.mark.slow
def test_data_that_ends_ends_the_run_and_groups_without_signal_are_counted(tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text(FLOW.format(model=str(ROOT / "flows" / "models" / "running-sums")))
    done = laminar_flow("run", str(flow), "--json", "--store", str(tmp_path / "runs"), "--run-id", "ending")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["status"]) == (0, "finished"), done.stderr
    assert summary["ended"].startswith("the data ended after 2 epochs")
    rows = Experience(str(tmp_path / "runs" / "ending" / "ending")).query(
        "select group_id, min(reward) < max(reward) as differs, min(state) as state, count(*) as n, "
        "min(evicted_reason) as reason from experience group by group_id"
    )
    groups = rows.to_pylist()
    assert len(groups) == 48 and {group["n"] for group in groups} == {4}
    assert all(group["differs"] for group in groups if group["state"] == "trained")
    assert {group["reason"] for group in groups if group["state"] == "evicted"} <= {"equal_rewards"}
    assert summary["table"]["trained"] == 16 * summary["steps"]
