"""The main job on a real cluster: the loop in its modes, its results, and how it stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.environments.reasoning_gym import reasoning_gym
from laminar.rollout.tokens import decode, encode, load_tokenizer
from laminar.watch.metrics import read_metrics
from tests.live import LiveRun, laminar_flow

SMALL = ["--batch-size", "32", "--eval-size", "32", "--evaluate-every", "0"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def on_policy(store: Path) -> Iterator[LiveRun]:
    """Three synchronous steps with one replica, finished."""
    run = LiveRun(store, "--steps", "3", "--replicas", "1", "--staleness-ceiling", "0", *SMALL)
    try:
        run.wait_for_step(1)
        asked = laminar_flow("query", run.url, "select count(*) as n from experience where reward = 1", "--json")
        assert asked.returncode == 0, asked.stderr
        run.during = json.loads(asked.stdout)
        run.final = run.result()
        yield run
    finally:
        run.close()


def test_the_run_prints_one_json_object_with_its_figures(on_policy: LiveRun) -> None:
    names = {
        "run_id", "status", "seconds", "steps", "trajectories", "reward_first_quarter", "reward_last_quarter",
        "eval_before", "eval_after", "tokens_per_second", "trainer_wait_fraction", "rollout_busy_fraction",
        "staleness_mean", "staleness_max", "versions_per_trajectory_max",
    }  # fmt: skip
    assert names <= set(on_policy.final)
    assert all(on_policy.final[name] is not None for name in names)
    assert on_policy.final["status"] == "finished"
    assert (on_policy.final["steps"], on_policy.final["trajectories"]) == (3, 96)


def test_at_a_ceiling_of_zero_every_trained_token_is_of_the_version_being_updated(on_policy: LiveRun) -> None:
    rows = on_policy.query(
        "select trained_step, trained_version, weight_version from experience where state = 'trained'"
    )
    assert len(rows) == 96
    assert all(row["trained_version"] == row["weight_version"] == row["trained_step"] - 1 for row in rows)
    assert on_policy.final["staleness_max"] == 0
    assert on_policy.final["versions_per_trajectory_max"] == 1


def test_each_of_several_versions_reaches_the_replica(on_policy: LiveRun) -> None:
    """verl #7495, SkyRL PR #1345, slime #1695: a version that is not delivered, or only the first one that is, shows
    in the ratio of the trainer's logprobs to the replica's; a step changes it by some 1e-5 in KL."""
    steps = read_metrics(on_policy.url, "steps").to_pylist()
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["grad_norm"] > 0 and step["learning_rate"] > 0 for step in steps)
    assert all(abs(step["importance_ratio_max"] - 1) < 1e-3 and step["kl"] < 1e-8 for step in steps)


def test_steps_with_stale_rows_tell_the_difference(store: Path) -> None:
    """The control of the test above: rows of the version before do not pass for those of this one."""
    run = LiveRun(store, "--steps", "6", *SMALL)
    try:
        assert run.result()["status"] == "finished"
        stale = [step for step in read_metrics(run.url, "steps").to_pylist() if step["staleness_mean"] > 0.9]
        assert stale and all(step["kl"] > 1e-8 for step in stale)
        assert run.query("select count(distinct replica) as n from experience")[0]["n"] == 2
    finally:
        run.close()


def test_sql_answers_while_the_run_goes_on_and_after_it(on_policy: LiveRun) -> None:
    after = on_policy.query("select count(*) as n from experience where reward = 1")[0]["n"]
    assert "n" in json.dumps(on_policy.during)
    assert after > 0


def test_the_final_checkpoint_gives_the_greedy_accuracy_with_plain_generate(on_policy: LiveRun) -> None:
    folder = Path(on_policy.url) / "checkpoints" / "final"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(folder))
    test = reasoning_gym("chain_sum", size=32, seed=1_000_001, **quickstart_sums())
    right = 0
    for index in range(32):
        prompt = test.prompt(index)
        ids = torch.tensor([encode(tokenizer, prompt)])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False)
        score = test.score(prompt, decode(tokenizer, out[0, ids.shape[1] :].tolist()))
        right += (score.reward or 0.0) > 0.999
    assert right / 32 == on_policy.final["eval_greedy_after"]


def test_the_report_and_the_metrics_are_in_the_runs_folder(on_policy: LiveRun) -> None:
    folder = Path(on_policy.url)
    assert "<svg" in (folder / "report.html").read_text()
    assert list((folder / "metrics").glob("steps-*.parquet"))
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_a_second_run_keeps_the_tasks_results_and_says_so_and_ctrl_c_stops_it_in_order(
    on_policy: LiveRun, store: Path
) -> None:
    run = LiveRun(store, "--steps", "500", *SMALL)
    try:
        run.wait_for_step(1)
        ours = psutil.Process(run.process.pid).children(recursive=True)
        run.interrupt()
        result = run.result()
        assert run.process.returncode == 0
        assert result["status"] == "stopped", run.said
        assert result["kept"] == ["held_out"]
        assert f"kept result of run {on_policy.run_id}" in run.said
        assert 1 <= result["steps"] < 500
        folder = Path(run.url)
        assert (folder / "checkpoints" / "final" / "model.safetensors").exists()
        counts = run.query("select state, count(*) as n from experience group by state")
        assert {row["state"] for row in counts} <= {"ready", "trained"}, "nothing stays leased or half done"
        assert not [process for process in ours if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not Path(f"/dev/shm/laminar-{run.run_id}").exists()
        _resume_and_stop_again(run, store, steps=result["steps"])
    finally:
        run.close()


def quickstart_sums() -> dict[str, int]:
    """The problems of the quickstart, from the flow itself."""
    from laminar.flow.load import load_flow
    from tests.live import FLOW

    return dict(load_flow(str(FLOW)).function.__globals__["SUMS"])


def _resume_and_stop_again(stopped: LiveRun, store: Path, *, steps: int) -> None:
    trained = stopped.query("select trajectory_id, trained_step from experience where state = 'trained'")
    run = LiveRun(store, run_id=stopped.run_id, resume=True)
    try:
        run.wait_for_step(steps + 2)
        run.interrupt()
        result = run.result()
        assert result["status"] == "stopped" and result["steps"] >= steps + 2
        rows = run.query("select trajectory_id, trained_step from experience where state = 'trained'")
        assert {row["trajectory_id"] for row in trained} <= {row["trajectory_id"] for row in rows}
        assert len({row["trajectory_id"] for row in rows}) == len(rows) == 32 * result["steps"]
        assert run.query("select min(trained_version - weight_version) as s from experience")[0]["s"] >= 0
    finally:
        run.close()


def test_resuming_a_finished_run_does_nothing(on_policy: LiveRun, store: Path) -> None:
    ended = laminar_flow("resume", on_policy.run_id, "--store", str(store), "--json", timeout=60)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["steps"] == on_policy.final["steps"]
