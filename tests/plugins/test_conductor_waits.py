"""Waits of the conductor and of what it uses: each has a deadline, and none is shorter than the work it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.errors import LaminarError, RunFailed
from laminar.experience.store import StoreError
from laminar.flow.context import RunContext
from laminar.watch.metrics import read_metrics
from laminar_dask import reporter as reporter_module
from laminar_dask import roles, trainer_link
from laminar_dask.conductor import STALL_DEADLINE, stall_deadline
from laminar_dask.reporter import Reporter
from laminar_dask.supervisor import ActorRestarted
from laminar_dask.trainer_link import START_DEADLINE, STEP_DEADLINE, TrainerLink


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def laminar_workers(role: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(roles, "SCHEDULER_DEADLINE", 0.05)
    worker: Any = SimpleNamespace(scheduler=SimpleNamespace(laminar_workers=laminar_workers))
    with pytest.raises(LaminarError, match=r"the scheduler did not say .* who has the role `data`"):
        asyncio.run(roles.peer(worker, "data"))


@pytest.mark.parametrize(("trajectory", "stall"), [(300.0, STALL_DEADLINE), (7200.0, 14400.0)])
def test_a_run_is_not_stalled_while_its_first_long_trajectories_may_still_be_running(
    trajectory: float, stall: float
) -> None:
    assert stall_deadline(SimpleNamespace(trajectory_deadline=trajectory)) == stall  # type: ignore[arg-type]


class Handle:
    """An actor whose calls and their deadlines are kept."""

    def __init__(self, version: int, *, lost: bool = False) -> None:
        self.version = version
        self.lost = lost
        self.calls: list[tuple[str, float]] = []

    async def call(self, method: str, *args: Any, within: float, **named: Any) -> Any:
        self.calls.append((method, within))
        if self.lost:
            raise ActorRestarted("the trainer was lost")
        return {"version": self.version, "step": 7}


@pytest.mark.parametrize(("version", "within"), [(-1, START_DEADLINE), (3, STEP_DEADLINE)])
def test_a_trainer_found_in_the_middle_of_a_step_is_given_the_time_of_a_step(version: int, within: float) -> None:
    handle = Handle(version)
    link = TrainerLink(handle, lambda text, **level: None)  # type: ignore[arg-type]
    asyncio.run(link.start())
    assert handle.calls == [("status", START_DEADLINE), ("start", within)]
    assert (link.step, link.version) == (7, version)


def test_a_trainer_that_is_lost_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "START_DEADLINE", 0.0)
    link = TrainerLink(Handle(0, lost=True), lambda text, **level: None)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"could not be started .* lost"):
        asyncio.run(link.start())


def test_metrics_outlive_a_store_that_refuses_them_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reporter_module, "FLUSH_SECONDS", 0.0)
    said: list[dict[str, Any]] = []
    worker: Any = SimpleNamespace(log_event=lambda topic, event: said.append(event))
    reporter = Reporter(worker, RunContext("run", str(tmp_path), str(tmp_path)), None)  # type: ignore[arg-type]
    flush, refusals = reporter.metrics.flush, iter([StoreError("the store is full")] * 3)

    async def look() -> None:
        reporter.metrics.write("replicas", {"name": "r", "running": 1})

    def refuse(older_than: float) -> None:
        if (error := next(refusals, None)) is not None:
            raise error
        flush(older_than)

    async def until_written() -> None:
        task = asyncio.create_task(reporter.run())
        while not task.done() and read_metrics(str(tmp_path), "replicas").num_rows < 4:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    reporter._look = look  # type: ignore[method-assign]
    reporter.metrics.flush = refuse  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(until_written(), 30))
    assert [event["text"] for event in said if event["type"] == "message"] == [
        "metrics are kept back, the store does not take them: the store is full"
    ]
