"""A replica is taken out of a live run by hand; the run goes on and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tests.live import LiveRun, laminar_flow

STEPS, BATCH = 500, 32  # it is stopped when it has been hurt enough
OPTIONS = ["--steps", str(STEPS), "--batch-size", str(BATCH), "--eval-size", "16", "--evaluate-every", "0"]


def test_a_run_goes_on_after_one_of_its_replicas_was_drained(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, *OPTIONS, run_id="drained")
    try:
        run.wait_for_step(1)
        store = ["--store", str(tmp_path), "--json"]
        moved = laminar_flow("repack", "drained", "--from", "rollout-1", "--to", "rollout-0", *store)
        assert json.loads(moved.stdout)["status"] == "ok", moved.stderr
        drained = laminar_flow("drain", "drained", "rollout-0", *store)
        assert json.loads(drained.stdout)["status"] == "ok", drained.stderr
        again = laminar_flow("drain", "drained", "rollout-1", *store)
        assert again.returncode == 2 and "only replica" in again.stderr
        unknown = laminar_flow("repack", "drained", "--from", "rollout-9", *store)
        assert unknown.returncode == 2 and "there are rollout-1" in unknown.stderr
        done = max(run.steps())
        run.wait_for_step(done + 1)
        assert "rollout-0" not in run.workers().values()  # nobody starts it again
        run.interrupt()
        result = run.result()
        assert result["status"] == "stopped" and result["steps"] > done, run.said
        rows = run.query("select trajectory_id, state, drop_reason, message from experience")
        assert len({row["trajectory_id"] for row in rows}) == len(rows)
        assert sum(row["state"] == "trained" for row in rows) == result["steps"] * BATCH
        assert not [row for row in rows if row["drop_reason"]]
    finally:
        run.close()


def test_a_run_that_is_over_cannot_be_repacked(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart" / "old"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "old", "started": "2030-01-01", "scheduler": None}))
    done = laminar_flow("repack", "old", "--from", "rollout-0", "--store", str(tmp_path))
    assert done.returncode == 2 and "has no scheduler: it is over" in done.stderr
    record = {"run_id": "old", "started": "2030-01-01", "status": "finished", "scheduler": "tcp://127.0.0.1:1"}
    (folder / "run.json").write_text(json.dumps(record))
    done = laminar_flow("drain", "old", "rollout-0", "--store", str(tmp_path))
    assert done.returncode == 2 and "run old is over (finished)" in done.stderr
