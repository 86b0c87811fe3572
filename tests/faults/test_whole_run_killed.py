"""Kill -9 of a whole run, and ``resume``: nothing acknowledged is lost, nothing trained twice, no bound forgotten."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.live import LiveRun

STEPS, BATCH, GROUP, CEILING, CHECKPOINT = 40, 32, 8, 2, 20
OPTIONS = ["--steps", str(STEPS), "--batch-size", str(BATCH), "--staleness-ceiling", str(CEILING)]
OPTIONS += ["--eval-size", "16", "--evaluate-every", "0"]
ROWS = (
    "select trajectory_id, group_id, group_size, prompt_id, response_ids, reward, weight_version, trained_step, "
    "trained_version, state from experience order by trajectory_id"
)


def _kill_whole(run: LiveRun) -> None:
    run.disconnect()
    mine = psutil.Process(run.process.pid)
    for process in [mine, *mine.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    run.end(30)


def test_a_run_killed_whole_goes_on_from_its_files(tmp_path: Path) -> None:
    """NeMo-RL PR #3599, OpenRLHF #1322, verl PR #4199 (lost), verl #7759 (in flight twice), AReaL #1388 (no bound)."""
    run = LiveRun(tmp_path, *OPTIONS)
    try:
        run.wait_for_step(CHECKPOINT + 2)
        _kill_whole(run)
    finally:
        run.close()
    before = {row["trajectory_id"]: row for row in run.query(ROWS)}
    again = LiveRun(tmp_path, run_id=run.run_id, resume=True)
    try:
        result = again.result()
    finally:
        again.close()
    assert (result["status"], result["steps"]) == ("finished", STEPS), again.said
    rows = again.query(ROWS)
    after = {row["trajectory_id"]: row for row in rows}
    assert len(after) == len(rows), "a trajectory is there twice"
    for name, row in before.items():  # what was acknowledged is what it was
        assert after[name]["response_ids"] == row["response_ids"] and after[name]["reward"] == row["reward"]
        if row["state"] == "trained" and row["trained_step"] <= CHECKPOINT:
            assert after[name]["trained_step"] == row["trained_step"]
    trained = [row for row in rows if row["state"] == "trained"]
    for step in range(1, STEPS + 1):
        assert sum(row["trained_step"] == step for row in trained) == BATCH
    assert all(0 <= row["trained_version"] - row["weight_version"] <= CEILING for row in trained)
    _no_prompt_is_skipped(before, rows)
    assert not Path(f"/dev/shm/laminar-{run.run_id}").exists()


def _no_prompt_is_skipped(before: dict[str, dict], rows: list[dict]) -> None:
    """Prompts drawn before the kill come first afterwards: each of them is whole, and each was drawn once."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    seen = {row["group_id"] for row in before.values()}
    assert seen and all(len(groups[name]) == GROUP for name in seen)
    for members in groups.values():
        assert len({row["prompt_id"] for row in members}) == 1
        assert len({row["trained_step"] for row in members}) == 1, "a group is trained in one step"
    assert len({members[0]["prompt_id"] for members in groups.values()}) == len(groups), "a prompt was drawn twice"
