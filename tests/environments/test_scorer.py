"""Scoring in processes that can be killed: deadlines, crashes, code by value, and nothing left behind."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from laminar.environments import Environment, Scorer, dataset, math_equal, reasoning_gym
from laminar.environments.process import ScoringProcess
from laminar.errors import UserError
from laminar.trajectory import Prompt, Score

WAIT = 60.0
FIRST = Prompt(id="acts-0", text="?", row={"answer": "1"})


def act(response: str) -> object:
    """Do in a reward function what the response says."""
    if response == "hang":
        while True:
            pass
    if response == "regex":
        return bool(re.match(r"(a+)+$", "a" * 60 + "b"))
    if response == "exit":
        os._exit(3)
    if response == "unnamed signal":
        os.kill(os.getpid(), signal.SIGRTMIN + 6)
    if response == "sys.exit":
        sys.exit(4)
    if response == "raise":
        raise KeyError("x")
    results = {
        "string": "0.5",
        "none": None,
        "pid": os.getpid(),
        "torch": "torch" in sys.modules,
        "main": threading.current_thread() is threading.main_thread(),
    }
    return results[response] if response in results else float(response)


class Acts(Environment):
    """One prompt, scored by ``act``."""

    name = "acts"

    def __len__(self) -> int:
        return 1

    def prompt(self, index: int) -> Prompt:
        return FIRST

    def score(self, prompt: Prompt, response: str) -> Score:
        return act(response)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(Acts(), deadline=1.0) as made:
        yield made


def score(scorer: Scorer, response: str) -> Score:
    return scorer.score(FIRST, response).result(timeout=WAIT)


def in_file(folder: Path, reward: str, rows: str = '{"prompt": "a", "answer": "1"}') -> Environment:
    """A data set whose reward function stands in a flow file that only this process has loaded."""
    (folder / "rows.jsonl").write_text(rows)
    (folder / "a_flow_file.py").write_text(reward)
    module = load(folder / "a_flow_file.py")
    return dataset(folder / "rows.jsonl", reward=module.my_reward)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_what_an_environment_has_to_load_first_does_not_count_against_the_deadline() -> None:
    """verifiers PR #1245: scoring has a budget of its own."""
    sums = reasoning_gym("chain_sum", size=10)
    with Scorer(sums, deadline=0.5) as scorer:
        right, wrong = (scorer.score(sums.prompt(0), text) for text in (sums.prompt(0).row["answer"], "no idea"))
        assert right.result(timeout=WAIT).reward == 1.0
        assert wrong.result(timeout=WAIT).reward == 0.0


def test_many_scores_come_back_each_to_its_own_future(scorer: Scorer) -> None:
    futures = [scorer.score(FIRST, str(number)) for number in range(500)]
    assert [future.result(timeout=WAIT).reward for future in futures] == list(range(500))


def test_it_is_used_from_many_threads_at_once(scorer: Scorer) -> None:
    results: dict[int, float | None] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: score(scorer, str(n)).reward}))  # type: ignore[misc]
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert results == {n: n for n in range(16)}


@pytest.mark.parametrize("response", ["hang", "regex"])
def test_an_endless_reward_dies_within_its_limit_and_the_next_one_is_scored(scorer: Scorer, response: str) -> None:
    """verl #288: an async timeout cannot stop code that never waits."""
    assert score(scorer, "1").reward == 1.0
    endless = score(scorer, response)
    assert (endless.reward, endless.status) == (None, "timeout")
    assert endless.message == "environment `acts` ran longer than 1 s and was stopped"
    assert endless.seconds >= 1.0
    assert score(scorer, "2").reward == 2.0


def test_a_reward_that_takes_its_process_down_is_an_error_and_the_next_one_is_scored(scorer: Scorer) -> None:
    crashed = score(scorer, "exit")
    assert (crashed.reward, crashed.status) == (None, "error")
    assert crashed.message == "environment `acts` ended its own process (exit code 3)"
    number = int(signal.SIGRTMIN) + 6
    assert score(scorer, "unnamed signal").message.endswith(f"its own process (killed by signal {number})")
    assert score(scorer, "2").reward == 2.0


def test_a_process_killed_while_idle_costs_no_score(scorer: Scorer) -> None:
    process = psutil.Process(int(score(scorer, "pid").reward or 0))
    process.kill()
    psutil.wait_procs([process], timeout=WAIT)
    assert score(scorer, "2").reward == 2.0


def test_what_a_reward_raises_or_returns_wrongly_is_an_error_with_one_line(scorer: Scorer) -> None:
    raised = score(scorer, "raise")
    assert (raised.reward, raised.status) == (None, "error")
    assert re.fullmatch(r"environment `acts` raised KeyError: 'x' \(in act, line \d+\)", raised.message)
    assert "raised SystemExit: 4 (in act, line " in score(scorer, "sys.exit").message
    assert score(scorer, "string").message.startswith("environment `acts` returned a str ('0.5'); expected a number")


def test_none_is_skipped_and_never_zero(scorer: Scorer) -> None:
    skipped = score(scorer, "none")
    assert (skipped.reward, skipped.status) == (None, "skipped")


def test_its_processes_load_no_torch_and_score_on_their_main_thread(scorer: Scorer) -> None:
    assert score(scorer, "torch").reward == 0.0
    assert score(scorer, "main").reward == 1.0


def test_a_row_that_cannot_be_sent_is_an_error_and_the_next_one_is_scored(scorer: Scorer) -> None:
    prompt = Prompt(id="acts-1", text="?", row={"lock": threading.Lock()})
    refused = scorer.score(prompt, "1").result(timeout=WAIT)
    assert refused.status == "error"
    assert refused.message.startswith("row acts-1 cannot be sent to environment `acts`: TypeError: cannot pickle")
    assert score(scorer, "2").reward == 2.0


def test_whatever_goes_wrong_around_a_process_the_score_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scorer(Acts()) as scorer:
        assert score(scorer, "1").reward == 1.0
        with monkeypatch.context() as patch:
            patch.setattr(ScoringProcess, "is_ready", lambda self: 1 / 0)
            failed = score(scorer, "1")
        assert failed.status == "error" and "`acts`: ZeroDivisionError: division by zero" in failed.message
        assert score(scorer, "2").reward == 2.0


def test_a_process_that_takes_no_question_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.environments.process._STALL_SECONDS", 1)
    with Scorer(Acts(), deadline=1.0) as scorer:
        process = psutil.Process(int(score(scorer, "pid").reward or 0))
        process.suspend()
        stalled = score(scorer, "1" * 4_000_000)  # more than the system holds for it
        assert stalled.status == "timeout"
        psutil.wait_procs([process], timeout=WAIT)
        assert score(scorer, "2").reward == 2.0


def test_a_cancelled_score_is_never_run(scorer: Scorer) -> None:
    busy = scorer.score(FIRST, "hang")
    waiting = scorer.score(FIRST, "exit")
    assert waiting.cancel()
    assert busy.result(timeout=WAIT).status == "timeout"
    assert score(scorer, "2").reward == 2.0


def test_closing_waits_for_no_slow_judge_and_leaves_no_process() -> None:
    """slime #2176."""
    scorer = Scorer(Acts(), processes=2, deadline=10 * WAIT)  # longer than a test may take
    processes = [psutil.Process(int(score(scorer, "pid").reward or 0)) for _ in range(2)]
    outstanding = [scorer.score(FIRST, response) for response in ("hang", "hang", "1")]
    scorer.close()
    scorer.close()
    assert {future.result(timeout=1).message for future in outstanding} == {
        "the scorer was closed before the answer was scored"
    }
    assert not psutil.wait_procs(processes, timeout=5)[1]
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score(FIRST, "1")


def test_a_reward_of_a_flow_file_and_its_helpers_travel_by_value(tmp_path: Path) -> None:
    source = (
        "import math\n"
        "SCALE = 0.5\n"
        "def helper(x): return math.floor(x) * SCALE\n"
        "def my_reward(completions, **kwargs): return [helper(float(completions[0]))]\n"
    )
    environment = in_file(tmp_path, source)
    (tmp_path / "a_flow_file.py").unlink()
    with Scorer(environment) as scorer:
        assert scorer.score(environment.prompt(0), "3.9").result(timeout=WAIT).reward == 1.5


@pytest.mark.parametrize(
    "source",
    [
        "import functools\ndef f(limit, response): return limit + len(response)\nmy_reward = functools.partial(f, 1)",
        "class Judge:\n    def rate(self, response): return 3\nmy_reward = Judge().rate",
        "class Judge:\n    def __call__(self, response): return 3\nmy_reward = Judge()",
        "my_reward = lambda response: 3",
        "def outer(n):\n    def inner(response): return n\n    return inner\nmy_reward = outer(3)",
    ],
)
def test_every_way_to_write_a_reward_travels_without_its_file(tmp_path: Path, source: str) -> None:
    packed = pickle.dumps(in_file(tmp_path, source))
    del sys.modules["a_flow_file"]
    assert pickle.loads(packed).score(FIRST, "ab").reward == 3.0


def test_an_environment_of_a_flow_file_travels_without_its_file(tmp_path: Path) -> None:
    body = inspect.getsource(Acts).replace("FIRST", "Prompt(id='a', text='b')").replace("act(response)", "LIMIT")
    header = "from laminar.environments import Environment\nfrom laminar.trajectory import Prompt, Score\nLIMIT = 7.0\n"
    (tmp_path / "a_flow_file.py").write_text(header + body)
    acts = load(tmp_path / "a_flow_file.py").Acts()
    packed, before = pickle.dumps(acts), acts.fingerprint()
    del sys.modules["a_flow_file"]
    assert pickle.loads(packed).fingerprint() == before
    with Scorer(pickle.loads(packed)) as scorer:
        assert scorer.score(FIRST, "1").result(timeout=WAIT).reward == 7.0


def test_math_verify_is_right_in_the_scorer_with_its_own_alarm(tmp_path: Path) -> None:
    source = (
        "import math_verify\n"
        "def my_reward(response, answer):\n"
        "    return math_verify.verify(math_verify.parse(answer), math_verify.parse(response))\n"
    )
    environment = in_file(tmp_path, source, r'{"prompt": "half of 1", "answer": "$\\frac{1}{2}$"}')
    with Scorer(environment) as scorer:
        futures = [scorer.score(environment.prompt(0), text) for text in ("it is 0.5", "it is 0.6")]
        assert [future.result(timeout=WAIT).reward for future in futures] == [1.0, 0.0]
    assert math_equal("it is 0.5", r"\frac{1}{2}") == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise ValueError('bad')",
            r"reward `my_reward` raised ValueError: bad \(in my_reward, line 2\) \(tried on rows-0",
        ),
        ("return '0.5'", r"reward `my_reward` returned a str \('0.5'\); expected a number"),
        ("return [1.0, 2.0]", "reward `my_reward` returned a list of 2; expected a number"),
        ("while True: pass", "reward `my_reward` ran longer than 1 s and was stopped"),
        ("import os; os._exit(7)", r"reward `my_reward` ended its own process \(exit code 7\)"),
        ("return 1 / (response != 'no answer')", r"ZeroDivisionError.*with the response 'no answer'"),
    ],
)
def test_a_reward_that_cannot_work_is_told_before_a_run_starts(tmp_path: Path, body: str, message: str) -> None:
    environment = in_file(tmp_path, f"def my_reward(response, answer):\n    {body}\n")
    with pytest.raises(UserError, match=message) as raised:
        environment.check(deadline=1.0)
    assert "\n" not in str(raised.value)


def test_a_reward_that_works_or_skips_passes_the_check(tmp_path: Path) -> None:
    in_file(tmp_path, "def my_reward(response, answer): return None if response == answer else 0.0").check()


def test_an_environment_that_cannot_be_sent_is_the_users_error(tmp_path: Path) -> None:
    source = "import threading\nLOCK = threading.Lock()\ndef my_reward(response):\n    with LOCK: return 1.0\n"
    with pytest.raises(
        UserError, match="reward `my_reward` cannot be sent to another process: TypeError: cannot pickle"
    ):
        in_file(tmp_path, source).check()


SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from laminar.environments import Scorer, dataset

with open("runs", "a") as runs:
    runs.write(f"{__name__}\\n")

def my_reward(response):
    import re, subprocess
    print("printed by a reward", flush=True)
    if response == "wait":
        started = subprocess.Popen(["sleep", "600"])
        Path("pids").write_text(f"{os.getpid()} {started.pid}")
        Path("pids").rename("started")
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0

if __name__ == "__main__":
    Path("rows.jsonl").write_text('{"prompt": "a"}')
    environment = dataset("rows.jsonl", reward=my_reward)
    scorer = Scorer(environment, deadline=600)
    print(scorer.score(environment.prompt(0), "now").result(timeout=60).reward, flush=True)
    scorer.score(environment.prompt(0), "wait").result(timeout=600)
"""


def test_processes_die_with_a_parent_that_is_killed_and_never_run_its_main(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "1.0\n"
            wait_for(tmp_path / "started")
            family = [psutil.Process(int(pid)) for pid in (tmp_path / "started").read_text().split()]
        finally:
            parent.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=10)[1]
        _, errors = parent.communicate(timeout=10)
    assert "printed by a reward" in errors
    assert (tmp_path / "runs").read_text() == "__main__\n"


def wait_for(path: Path) -> None:
    """Wait until a file is there, at most ``WAIT`` seconds."""
    expires = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < expires, f"{path} was not written"
        threading.Event().wait(0.01)
