"""``laminar-flow run`` as a user meets it: a process in a terminal, with Ctrl-C for its whole group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

FLOW = """
import asyncio
import laminar as lm
from distributed import get_worker
from laminar.flow.trace import stage

class Spec:
    def check(self): pass
    def derived(self): return {}
    def needs(self): return {}

@lm.task
def five() -> int:
    print("a task may print")
    return 5

async def hold(spec, context, **inputs):
    topic = f"laminar-control-{context.run_id}"
    while inputs["how"] == "deaf" or not await get_worker().scheduler.events(topic=topic):
        if inputs["how"] == "at once":
            break
        await asyncio.sleep(0.02)
    return inputs["value"]

@lm.flow
def demo(how: str = "at once"):
    return stage("hold", hold, Spec(), {"value": five(), "how": how})
"""
DEADLINE = 90.0


@contextmanager
def laminar_flow(folder, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, as a shell starts it; it does not outlive the test."""
    (folder / "flow.py").write_text(FLOW)
    command = [sys.executable, "-m", "laminar.cli.app", "run", "flow.py", "--json", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    guard = threading.Timer(DEADLINE, process.kill)
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        process.kill()
        process.wait(timeout=10)


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    assert any(text in line for line in process.stderr), f"{text!r} was never printed"


def nothing_is_left_of(session: int) -> bool:
    """Whether all processes of the session are gone; waits up to 10 s for their last breath."""
    left = [p for p in psutil.process_iter() if _session(p.pid) == session]
    return not psutil.wait_procs(left, timeout=10)[1]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_a_run_is_one_json_object_and_the_second_one_skips_the_task(tmp_path):
    for kept in ([], ["five"]):
        with laminar_flow(tmp_path) as process:
            out, err = process.communicate(timeout=DEADLINE)
        answer = json.loads(out)
        assert process.returncode == 0 and answer["status"] == "finished" and answer["result"] == 5
        assert answer["kept"] == kept
        assert err.splitlines()[0].startswith(f"run {answer['run_id']}   dashboard http://127.0.0.1:")
    assert "five: kept result of run " in err


def test_a_run_whose_terminal_hangs_up_drains_though_nobody_sees_it_any_more(tmp_path):
    with laminar_flow(tmp_path, "--how", "until stopped") as process:
        read_until(process, "stage hold: running")
        process.stderr.close()
        os.killpg(process.pid, signal.SIGHUP)
        os.killpg(process.pid, signal.SIGHUP)
        out = process.stdout.read()
        code = process.wait(timeout=DEADLINE)
    answer = json.loads(out)
    assert code == 0 and answer["status"] == "stopped" and answer["result"] == 5
    assert nothing_is_left_of(process.pid)


@pytest.mark.parametrize(("how", "times", "code"), [("until stopped", 1, 0), ("deaf", 2, 130)])
def test_ctrl_c_once_drains_and_twice_stops_at_once_and_no_process_is_left(tmp_path, how, times, code):
    with laminar_flow(tmp_path, "--how", how) as process:
        read_until(process, "stage hold: running")
        os.killpg(process.pid, signal.SIGINT)
        read_until(process, "stopping: ")
        if times == 2:
            os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE)
    answer = json.loads(out)
    assert process.returncode == code and answer["status"] == "stopped"
    record = json.loads((tmp_path / "runs" / "demo" / answer["run_id"] / "run.json").read_text())
    assert record["status"] == "stopped"
    assert nothing_is_left_of(process.pid)
