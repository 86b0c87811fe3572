"""Evaluations: how long they are waited for, and what they are made of."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from laminar.errors import LaminarError
from laminar.flow.context import RunContext
from laminar.settings import Policy
from laminar.trajectory import Prompt, Sampling, TrajectoryRequest
from laminar_dask import evaluation as module
from laminar_dask.evaluation import EvaluationJob

MODEL = Path(__file__).parents[2] / "flows" / "models" / "running-sums"
ANSWER = {"reward": 1.0, "tokens": 2}


def job_of(answers: int) -> tuple[EvaluationJob, list[Any]]:
    requests = [
        TrajectoryRequest("run", f"e{number}", 0, 2, Prompt("p", "1 + 1 ="), (5,), Sampling(), "sums")
        for number in range(answers)
    ]
    reports: list[Any] = []
    return EvaluationJob(step=3, version=4, requests=requests, report=reports.append), reports


def late(job: EvaluationJob, answers: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """So many answers come, each just before the time is up; the times that were waited."""
    waited: list[float] = []

    async def within(seconds: float, waiting: Any) -> None:
        waiting.close()
        waited.append(seconds)
        if len(waited) <= answers:
            job.add(job.requests[len(waited) - 1], ANSWER)
        raise TimeoutError

    monkeypatch.setattr(module, "within", within)
    return waited


def test_an_evaluation_may_take_as_long_as_answers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    job, reports = job_of(4)
    late(job, 4, monkeypatch)
    asyncio.run(job.finish(60))
    assert [(report.prompts, report.version, report.reward_mean) for report in reports] == [(4, 4, 1.0)]


def test_an_evaluation_without_any_more_answers_ends_with_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = job_of(4)
    waited = late(job, 2, monkeypatch)
    with pytest.raises(LaminarError, match="2 of 4 answers, and none came for 60 s"):
        asyncio.run(job.finish(60))
    assert waited == [60] * 3


class Answer:
    """A future."""

    ready = False

    def done(self) -> bool:
        return self.ready


@pytest.mark.parametrize("come", [3, 1])
def test_the_evaluate_stage_waits_as_long_as_answers_come(monkeypatch: pytest.MonkeyPatch, come: int) -> None:
    futures = [Answer() for _ in range(3)]

    async def wait(fs: list[Answer], timeout: float) -> None:
        pending = [future for future in fs if not future.ready]
        if not pending:
            return
        if 3 - len(pending) < come:
            pending[0].ready = True
        raise TimeoutError

    monkeypatch.setattr(module, "wait", wait)
    if come == 3:
        asyncio.run(module._all_done(futures, 60))
    else:
        with pytest.raises(LaminarError, match="1 of 3 answers"):
            asyncio.run(module._all_done(futures, 60))


def test_the_tokenizer_of_a_policy_comes_from_any_store_without_its_weights() -> None:
    store = fsspec.filesystem("memory")
    for file in MODEL.iterdir():
        with store.open(f"/policy/final/{file.name}", "wb") as out, file.open("rb") as content:
            shutil.copyfileobj(content, out)
    tokenizer = module._tokenizer("memory://policy/final")
    assert tokenizer.decode([10]) == module._tokenizer(str(MODEL)).decode([10])
    with module.checkpoint.as_local("memory://policy/final", weights=False) as folder:
        assert {path.name for path in folder.iterdir()} == {file.name for file in MODEL.iterdir()} - {
            "model.safetensors"
        }


class Registered(list):
    """A client that keeps what is registered with it."""

    async def __aenter__(self) -> Registered:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def register_plugin(self, plugin: Any) -> None:
        self.append(plugin)

    async def gather(self, futures: list[Any]) -> list[Any]:
        return []


def test_the_evaluate_stage_gives_the_scorer_the_time_that_it_had_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Registered()
    worker = SimpleNamespace(scheduler=SimpleNamespace(address=""), security=None)
    monkeypatch.setattr(module, "get_worker", lambda: worker)
    monkeypatch.setattr(module, "Client", lambda *args, **named: client)
    monkeypatch.setattr(module, "submit", lambda client, requests: [])
    monkeypatch.setattr(module, "held_out_requests", lambda prompts, **named: [])
    monkeypatch.setattr(module, "wait", lambda futures, timeout: asyncio.sleep(0))
    policy = Policy(str(MODEL), version=3, run_id="run", step=3, score_deadline=75.0)
    prompts = SimpleNamespace(fingerprint=lambda: "sums")
    asyncio.run(module.evaluate_policy(policy, prompts, RunContext("run", "", "")))
    assert [(plugin.name, plugin.deadline) for plugin in client] == [("laminar-environment-sums", 75.0)]
