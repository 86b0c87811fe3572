"""A run that trains and serves in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

from laminar.watch.metrics import read_metrics
from tests.live import ROOT, laminar_flow

FLOW = """
import laminar as lm

@lm.flow
def half():
    return lm.post_train(
        model={model!r},
        environment=lm.reasoning_gym("chain_sum", size=64, seed=3, min_terms=2, max_terms=4, max_digits=2),
        algorithm=lm.GRPO(group_size=4),
        rollouts=lm.Rollouts(replicas=1, max_new_tokens=64, kv_tokens=16384),
        steps=3,
        batch_size=16,
        staleness_ceiling=0,
        dtype="bfloat16",
    )
"""


def test_replicas_serve_what_a_trainer_publishes_in_bfloat16(tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text(FLOW.format(model=str(ROOT / "flows" / "models" / "running-sums")))
    done = laminar_flow("run", str(flow), "--json", "--store", str(tmp_path / "runs"), "--run-id", "half")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    steps = read_metrics(str(tmp_path / "runs" / "half" / "half"), "steps").to_pylist()
    print([(step["importance_ratio_mean"], step["importance_ratio_max"], step["kl"]) for step in steps])
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["staleness_max"] == 0 for step in steps)
    assert all(abs(step["importance_ratio_mean"] - 1) < 0.01 and step["kl"] < 1e-3 for step in steps)
