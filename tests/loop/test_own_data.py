"""Flows over the user's own data: what is wrong is one line before a model loads, what fails later is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live import ROOT, LiveRun, laminar_flow

MODEL = ROOT / "flows" / "models" / "running-sums"

FLOW = """
import laminar as lm

{reward}

@lm.flow
def quickstart(steps: int = 2, batch_size: int = 16):
    return lm.post_train(
        model={model!r},
        environment=lm.dataset({data!r}, prompt={prompt!r}, answer="answer", reward=reward),
        algorithm=lm.GRPO(group_size=4),
        rollouts=lm.Rollouts(replicas=1, max_new_tokens=64, kv_tokens=16384, score_deadline=1.0),
        steps=steps,
        batch_size=batch_size,
    )
"""
GOOD = 'def reward(response, answer):\n    return float(f"<answer>{answer}</answer>" in response)'


def question(a: int, b: int) -> str:
    return f"State the final answer to the following arithmetic problem: {a} + {b} ="


def write_flow(folder: Path, *, reward: str = GOOD, rows: int = 16, prompt: str = "question", long: int = 0) -> Path:
    lines = [{"question": question(a, 2 * a), "answer": str(3 * a)} for a in range(rows)]
    if long:
        lines[-1]["question"] = question(1, 1) * long
    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flow = folder / "flow.py"
    flow.write_text(FLOW.format(reward=reward, model=str(MODEL), data=str(data), prompt=prompt))
    return flow


BAD = {
    "a data set smaller than one batch": ({"rows": 3}, ["3 prompts", "needs 4"]),
    "a reward that raises": ({"reward": "def reward(response, answer):\n    return 1 / 0"}, ["`reward`", "division"]),
    "a reward that hangs": (
        {"reward": "def reward(response, answer):\n    while True: pass"},
        ["`reward`", "1 s"],
    ),
    "a reward that returns a string": (
        {"reward": "def reward(response, answer):\n    return '0.5'"},
        ["`reward` returned a str"],
    ),
    "a reward that returns a list of the wrong length": (
        {"reward": "def reward(completions, answer):\n    return [1.0, 0.0]"},
        ["`reward` returned a list of 2"],
    ),
    "a missing column": ({"prompt": "prompt"}, ["prompt", "question"]),
    "a prompt longer than the model takes": ({"long": 60}, ["too long", "tokens"]),
}


@pytest.mark.parametrize("what", BAD)
def test_one_clear_line_and_exit_code_2_before_any_model_loads_for(what: str, tmp_path: Path) -> None:
    """ASearcher #21 (fewer prompts than a batch), verl #758 (column), verl #288 (endless), TRL #6533 (length)."""
    settings, words = BAD[what]
    flow = write_flow(tmp_path, **settings)
    ended = laminar_flow("run", str(flow), "--store", str(tmp_path / "runs"), timeout=60)
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, ended.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").rglob("run.json"))


def test_a_permanently_failing_prompt_is_dropped_counted_and_replaced(tmp_path: Path) -> None:
    fails = "def reward(response, answer):\n    if answer in ('6', '9'): raise ValueError('cannot score this')\n"
    flow = write_flow(tmp_path, reward=fails + "    return float(answer in response)")
    run = LiveRun(tmp_path / "runs", "--steps", "6", flow=flow)
    try:
        result = run.result()
        assert result["status"] == "finished", run.said
        assert result["steps"] == 6 and result["trajectories"] == 6 * 16
        dropped = run.query("select count(*) as n from experience where drop_reason = 'reward_error'")[0]["n"]
        assert dropped == result["dropped_by_reason"]["reward_error"] > 0
        assert dropped % 4 == 0, "whole groups of the two prompts"
        assert "cannot score this" in run.said
    finally:
        run.close()


def test_when_every_reward_fails_the_run_ends_with_the_cause(tmp_path: Path) -> None:
    late = (
        "import os, pathlib\nCALLS = pathlib.Path(__file__).parent / 'calls'\n"
        "def reward(response, answer):\n"
        "    if response == 'no answer' or response == answer: return 0.0\n"
        "    raise RuntimeError('the judge is away')"
    )
    flow = write_flow(tmp_path, reward=late)
    run = LiveRun(tmp_path / "runs", "--steps", "50", flow=flow)
    try:
        result = run.result()
        assert run.process.returncode == 1
        assert result["status"] == "failed"
        assert "the judge is away" in result["error"]
    finally:
        run.close()
