"""What a worker does with a task: code that ends its process does not go unnoticed, nor on for ever."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.errors import RunFailed
from laminar.flow import work
from laminar.flow.context import RunContext
from laminar.flow.kept import Identity


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a task's node as a worker of the scheduler at ``run.scheduler`` does; remembers its events."""
    events: list[dict[str, Any]] = []
    context = RunContext.of(str(tmp_path), "demo", "r1")

    def task(function, *args):
        return work.run_task("count", function, Identity("count", "abc"), context, (args, {}))

    def worker():
        return SimpleNamespace(
            log_event=lambda topic, event: events.append(event), scheduler=SimpleNamespace(address=task.scheduler)
        )

    task.scheduler, task.events = "tcp://127.0.0.1:1", events
    monkeypatch.setattr(work, "get_worker", worker)
    return task


def crashes(run) -> None:
    """Run a task that takes its process down, in a process of its own."""
    child = os.fork()
    if child == 0:
        run(os._exit, 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def interrupted(code: int) -> None:
    """As a library does that takes itself for the program."""
    raise KeyboardInterrupt(code)


@pytest.mark.parametrize("how", [sys.exit, interrupted])
def test_a_task_that_exits_is_one_that_failed(run, how):
    with pytest.raises(RuntimeError, match=r"it ended with (SystemExit|KeyboardInterrupt)\(3\); expected a result"):
        run(how, 3)
    assert [event["state"] for event in run.events] == ["running", "failed"]


def test_a_task_that_takes_its_process_down_is_tried_only_so_often(run):
    for _ in range(work.MOST_STARTS):
        crashes(run)
    with pytest.raises(RunFailed, match="count was started 3 times and each time its process ended"):
        run(os._exit, 3)


def test_starts_are_counted_anew_in_a_resumed_run_and_after_one_that_came_to_its_end(run):
    crashes(run)
    crashes(run)
    run.scheduler = "tcp://127.0.0.1:2"
    crashes(run)
    crashes(run)
    with pytest.raises(ZeroDivisionError):
        run(lambda n: n / 0, 3)
    crashes(run)
    crashes(run)
    assert run(float, 3) == 3.0
