"""Kill -9 of any one process, or of all workers at once: the run loses no finished trajectory, trains none twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import LiveRun

STEPS, BATCH = 12, 32
OPTIONS = ["--steps", str(STEPS), "--batch-size", str(BATCH), "--eval-size", "16", "--evaluate-every", "0"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path, *OPTIONS)
    yield live
    live.close()


ROLLOUTS = ["rollout-0", "rollout-1"]


@pytest.mark.parametrize(
    "roles",
    [
        ["rollout-0"],
        ["trainer"],
        ["relay"],
        ["data"],
        pytest.param(ROLLOUTS, marks=pytest.mark.slow),
        ["data", "relay", "trainer", *ROLLOUTS],
    ],
    ids=["rollout-0", "trainer", "relay", "data", "both rollouts", "all workers"],
)
def test_a_run_survives_the_death_of(roles: list[str], run: LiveRun) -> None:
    run.wait_for_step(2)
    finished = run.query("select count(*) as n from experience")[0]["n"]
    run.kill(*roles)
    nothing_was_lost(run, finished)


def test_a_run_survives_workers_that_close_for_good(run: LiveRun) -> None:
    run.wait_for_step(2)
    finished = run.query("select count(*) as n from experience")[0]["n"]
    run.close_workers("relay", "rollout-0")
    nothing_was_lost(run, finished)


def nothing_was_lost(run: LiveRun, finished: int) -> None:
    """It goes on to its end, with all that was finished before."""
    result = run.result()
    assert result["status"] == "finished", run.said
    assert result["steps"] == STEPS
    rows = run.query("select trajectory_id, trained_step, trained_version, weight_version, state from experience")
    ids = [row["trajectory_id"] for row in rows]
    assert len(ids) == len(set(ids)) and len(ids) >= finished
    trained = [row for row in rows if row["state"] == "trained"]
    assert len(trained) == STEPS * BATCH
    for step in range(1, STEPS + 1):
        assert sum(row["trained_step"] == step for row in trained) == BATCH
    assert all(row["trained_version"] >= row["weight_version"] >= 0 for row in trained)
    assert result["versions_per_trajectory_max"] == 1
