"""The quickstart on two hosts under a scheduler that was there before: trainer on one, replicas on both; it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar.bench.hosts import why_not
from laminar.experience.reader import Experience
from laminar.watch.metrics import read_metrics
from laminar.weights.transport import installed
from tests.netns.two_hosts import two_hosts

SHORT = ("--steps", "4", "--batch-size", "64", "--eval-size", "64")
LONG = ("--steps", "24", "--eval-size", "256")


def runs_and_learns(folder: Path, transport: str, *options: str, deadline: float) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(folder, transport) as cluster:
        cluster.wait_for_workers()
        done = cluster.flow(*options, deadline=deadline)
        assert done.returncode == 0, f"{done.stderr}\n{cluster.said('relay-1')}"
        result = json.loads(done.stdout)
        steps = result["steps"]
        left = cluster.on_first("ls", "/dev/shm", deadline=20).stdout
        assert result["run_id"] not in left, "the run's weights are still there although it has ended"
    assert (result["status"], steps) == ("finished", int(options[1]))
    assert result["eval_greedy_after"] > result["eval_greedy_before"], result
    first, second = (
        [row for row in read_metrics(result["url"], "relays").to_pylist() if row["name"] == name]
        for name in ("relay-0", "relay-1")
    )
    for relay in (first, second):  # the last look may be older than the last version
        assert 1 <= relay[-1]["version"] <= steps
    assert (first[-1]["position"], second[-1]["position"]) == (0, 1)
    assert first[-1]["bytes_out"] > 0 and second[-1]["bytes_in"] > 0
    assert {row["transport"] for row in first + second} == {transport}
    assert all(row["lag"] >= 0 for row in first + second)
    rows = Experience(result["url"]).query("select replica, max(weight_version) as newest from experience group by 1")
    newest = {row["replica"]: row["newest"] for row in rows.to_pylist()}
    assert newest.keys() == {"rollout-0", "rollout-1"}
    assert all(version > 0 for version in newest.values()), newest


@pytest.mark.parametrize(
    "transport",
    [  # half a minute each: one of them is enough in CI
        pytest.param(name, marks=pytest.mark.slow) if name == "ucx" else name for name in installed()
    ],
)
def test_the_quickstart_runs_and_learns_on_two_hosts(tmp_path: Path, transport: str) -> None:
    runs_and_learns(tmp_path, transport, *SHORT, deadline=240)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("transport", installed())
def test_a_longer_run_on_two_hosts_learns_too(tmp_path: Path, transport: str) -> None:
    runs_and_learns(tmp_path, transport, *LONG, deadline=900)
