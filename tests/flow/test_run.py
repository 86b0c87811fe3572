"""Flows run for real: on worker processes under nannies, one of which is not the data worker."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster

import laminar as lm
from laminar.errors import RunFailed, UserError
from laminar.flow import store
from laminar.flow.load import load_flow
from laminar.flow.run import execute

FLOW = '''
"""A flow file: what it defines travels to the workers by value."""
from dataclasses import dataclass
from typing import Any
import sys

from distributed import get_worker

import laminar as lm
from laminar.flow.trace import stage

@dataclass
class Box:
    values: list
    worker: str

def helper(x):
    return 2 * x

class Rule:
    def __call__(self, x):
        return helper(x)

@lm.task
def numbers(size: int, rule: Any) -> Box:
    return Box([rule(x) for x in range(size)], get_worker().name)

@lm.task
def total(box: Box, fail: str) -> int:
    if fail == "exit":
        sys.exit(3)
    if fail == "raise":
        raise ValueError("no sum\\nto be had")
    return sum(box.values)

class Spec:
    def __init__(self, rule):
        self.rule = rule
    def check(self): pass
    def derived(self): return {"rows per step": 3, "schedule": "none"}
    def needs(self): return {}

async def wait(spec, context, **inputs):
    if inputs["how"] == "wrong":
        raise lm.UserError("column `prompt` is missing; expected one")
    while inputs["how"] == "until stopped":
        if await get_worker().scheduler.events(topic=f"stop-{context.run_id}"):
            break
    return {"worker": get_worker().name, "rule": spec.rule(21), "total": inputs["total"]}

@lm.flow
def demo(size: int = 3, fail: str = "", how: str = "at once"):
    box = numbers(size, Rule())
    done = stage("wait", wait, Spec(Rule()), {"total": total(box, fail), "how": how})
    return {"done": done, "from": box.worker, "plain": size}
'''


class Running:
    """What ``laminar.cluster.start`` gives, on the test's cluster."""

    dashboard_link = "http://127.0.0.1:0/status"

    def __init__(self, client: Client, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.killed = False

    def request_stop(self) -> None:
        self.client.log_event(f"stop-{self.run_id}", "now")

    def kill(self) -> None:
        self.killed = True


class Shown:
    """A display that remembers; ``on`` is called with every line that it shows."""

    def __init__(self, on=lambda line: None) -> None:
        self.lines: list[str] = []
        self.on = on

    def _show(self, line: str) -> None:
        self.lines.append(line)
        self.on(line)

    def start(self, run_id, dashboard, stages) -> None:
        self._show(f"start {' '.join(stages)}")

    def event(self, event) -> None:
        self._show(event["text"] if event["type"] == "message" else f"{event['name']} {event['state']}")

    def message(self, text) -> None:
        self._show(text)

    def stop(self, summary) -> None:
        self._show(f"stop {summary and summary['status']}")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    common = {"nthreads": 2, "memory_limit": 0, "silence_logs": logging.CRITICAL, "dashboard": False}
    workers = {
        "data": {"cls": Nanny, "options": {**common, "resources": {"data": 1, "task": 1}}},
        "other": {"cls": Nanny, "options": {**common, "resources": {"rollout": 9}}},
    }
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False, "dashboard_address": ":0"}}
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        with SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.CRITICAL) as cluster:
            with Client(cluster, set_as_default=False) as client:
                client.wait_for_workers(2, timeout=60)
                yield client


@pytest.fixture
def start(client: Client):
    @contextlib.contextmanager
    def start_cluster(needs: dict[str, Any], context: Any) -> Iterator[Running]:
        start_cluster.running = Running(client, context.run_id)
        yield start_cluster.running

    return start_cluster


@pytest.fixture
def flow(tmp_path):
    (tmp_path / "flow.py").write_text(FLOW)
    return load_flow(str(tmp_path / "flow.py"))


def record(store: Path) -> dict[str, Any]:
    run = lm.open_run("latest", store=str(store))
    return json.loads((Path(run.url) / "run.json").read_text())


def test_a_flow_runs_on_the_data_worker_with_what_its_file_defines(tmp_path, flow, start):
    shown = Shown()
    done = execute(flow, {"size": "4"}, store=str(tmp_path / "runs"), display=shown, start_cluster=start)
    assert done.status == "finished"
    assert done.result == {"done": {"worker": "data", "rule": 42, "total": 12}, "from": "data", "plain": 4}
    assert shown.lines[0] == "start numbers total wait"
    assert shown.lines[1:4] == ["wait: rows per step 3, schedule none", "numbers running", "numbers done"]
    assert [line for line in shown.lines if not line.startswith("report: ")][-2:] == ["wait done", "stop finished"]
    written = record(tmp_path / "runs")
    assert written["status"] == "finished" and written["parameters"]["size"] == 4
    assert written["versions"]["dask"] == dask.__version__ and written["source_hash"]
    assert lm.open_run("latest", store=str(tmp_path / "runs")).summary == done.summary


def test_a_second_run_skips_its_tasks_and_says_so_unless_the_kept_file_is_damaged(tmp_path, flow, start):
    store = str(tmp_path / "runs")
    first = execute(flow, {}, store=store, start_cluster=start)
    shown = Shown()
    second = execute(flow, {}, store=store, display=shown, start_cluster=start)
    assert second.result == first.result and second.summary["kept"] == ["numbers", "total"]
    assert f"numbers: kept result of run {first.run_id}" in shown.lines
    for file in (tmp_path / "runs" / "tasks").glob("numbers-*"):
        file.write_bytes(b"damaged")
    shown = Shown()
    third = execute(flow, {}, store=store, display=shown, start_cluster=start)
    assert third.result == first.result and third.summary["kept"] == ["total"]
    assert any("numbers: the kept result" in line and "computing it again" in line for line in shown.lines)
    assert "numbers done" in shown.lines


def test_a_task_that_raises_fails_the_run_in_one_line_with_its_traceback_in_the_logs(tmp_path, flow, start):
    shown = Shown()
    with pytest.raises(RunFailed, match=r"^total raised ValueError: no sum to be had; its traceback is in ") as caught:
        execute(flow, {"fail": "raise"}, store=str(tmp_path / "runs"), display=shown, start_cluster=start)
    log = Path(str(caught.value).split("traceback is in ")[1]).read_text()
    assert "in total" in log and "ValueError: no sum" in log
    written = record(tmp_path / "runs")
    assert written["status"] == "failed" and written["error"] == str(caught.value)
    assert shown.lines[-2:] == ["total failed", "stop None"]


def test_a_task_that_exits_is_one_that_failed(tmp_path, flow, start):
    with pytest.raises(
        RunFailed, match=r"^total raised RuntimeError: it ended with SystemExit\(3\); expected a result"
    ):
        execute(flow, {"fail": "exit"}, store=str(tmp_path), start_cluster=start)


def test_an_error_for_the_user_comes_from_a_worker_as_it_is(tmp_path, flow, start):
    with pytest.raises(UserError, match=r"^column `prompt` is missing; expected one$"):
        execute(flow, {"how": "wrong"}, store=str(tmp_path / "runs"), start_cluster=start)
    assert record(tmp_path / "runs")["error"] == "column `prompt` is missing; expected one"


def test_ctrl_c_once_stops_the_run_in_order(tmp_path, flow, start):
    def on(line: str) -> None:
        if line == "wait running":
            os.kill(os.getpid(), signal.SIGINT)

    shown = Shown(on)
    before = signal.getsignal(signal.SIGINT)
    done = execute(flow, {"how": "until stopped"}, store=str(tmp_path), display=shown, start_cluster=start)
    assert done.status == "stopped" and done.result["done"]["worker"] == "data"
    assert any(line.startswith("stopping: ") for line in shown.lines)
    assert record(tmp_path)["status"] == "stopped"
    assert signal.getsignal(signal.SIGINT) is before and not start.running.killed


def test_ctrl_c_after_the_end_makes_nothing_of_a_run_that_is_finished(tmp_path, flow, start):
    def on(line: str) -> None:
        if line.startswith("report: "):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    done = execute(flow, {}, store=str(tmp_path), display=Shown(on), start_cluster=start)
    assert done.status == record(tmp_path)["status"] == "finished"


def test_a_run_that_cannot_be_drawn_is_finished_all_the_same(tmp_path, flow, start, monkeypatch):
    monkeypatch.setattr("laminar.watch.report.write_report", lambda url: 1 / 0)
    shown = Shown()
    done = execute(flow, {}, store=str(tmp_path), display=shown, start_cluster=start)
    assert done.status == record(tmp_path)["status"] == "finished"
    assert "no report was written: ZeroDivisionError: division by zero" in shown.lines


def test_where_the_store_fills_up_the_cause_is_told_and_not_what_followed_from_it(tmp_path, flow, start, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def on(line: str) -> None:
        if line == "total running":
            monkeypatch.setattr(store, "write_bytes", full)

    shown = Shown(on)
    with pytest.raises(
        RunFailed, match=r"^total raised ValueError: no sum to be had; its traceback could not be kept in"
    ):
        execute(flow, {"fail": "raise"}, store=str(tmp_path), display=shown, start_cluster=start)
    assert any("run.json does not say how the run ended: [Errno 28] No space left" in line for line in shown.lines)


def test_ctrl_c_twice_kills_the_cluster(tmp_path, flow, start, monkeypatch):
    def on(line: str) -> None:
        if line == "wait running" or line.startswith("stopping: "):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Running, "request_stop", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        execute(flow, {"how": "until stopped"}, store=str(tmp_path), display=Shown(on), start_cluster=start)
    assert start.running.killed
    assert record(tmp_path)["status"] == "stopped"
    start.running.client.log_event(f"stop-{start.running.run_id}", "now")


def test_a_run_can_be_started_from_any_thread(tmp_path, flow, start):
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(execute(flow, {}, store=str(tmp_path), start_cluster=start).status)
    )
    thread.start()
    thread.join(timeout=60)
    assert found == ["finished"]


def test_what_is_wrong_is_found_before_any_process_is_started(tmp_path, flow):
    def never(needs, context):
        raise AssertionError("started")

    with pytest.raises(UserError, match="has no parameter `sise`"):
        execute(flow, {"sise": 3}, store=str(tmp_path), start_cluster=never)
    with pytest.raises(UserError, match="cannot be written"):
        execute(flow, {}, store="/proc/nowhere", start_cluster=never)
    assert not list(tmp_path.glob("demo"))


def test_a_cluster_that_does_not_start_fails_the_run(tmp_path, flow):
    def broken(needs, context):
        raise OSError("no port left")

    with pytest.raises(RunFailed, match=r"^OSError: no port left; its traceback is in "):
        execute(flow, {}, store=str(tmp_path), start_cluster=broken)
    assert record(tmp_path)["status"] == "failed"
