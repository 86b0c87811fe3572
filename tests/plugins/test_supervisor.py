"""Actors that die: what is taken for a death, and when one is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm import CommClosedError

from laminar.errors import RunFailed
from laminar_dask import supervisor as module
from laminar_dask.supervisor import MAX_RESTARTS, ActorHandle, ActorRestarted, ActorSupervisor


class Actor:
    """Raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def work(self) -> str:
        if self.error is not None:
            raise self.error
        return "done"

    async def hang(self) -> None:
        await asyncio.Event().wait()


def handle_of(actor: Actor, *seen: dict[str, Any]) -> ActorHandle:
    """A handle whose supervisor answers so, the last answer again and again."""
    answers = list(seen) or [{"restarts": 0, "given_up": False}]

    async def laminar_actor_restarts(key: str) -> dict[str, Any]:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def result() -> Actor:
        return actor

    worker = SimpleNamespace(scheduler=SimpleNamespace(laminar_actor_restarts=laminar_actor_restarts))
    return ActorHandle(SimpleNamespace(key="one", result=result), worker, name="trainer")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "lost",
    [
        CommClosedError("in <TCP>"),
        OSError("Unable to contact Actor's worker"),
        RuntimeError("Worker holding Actor was lost.  Status: error"),
    ],
)
def test_a_lost_actor_is_told_as_one_that_comes_back(lost: Exception) -> None:
    with pytest.raises(ActorRestarted, match="the trainer was lost"):
        asyncio.run(handle_of(Actor(lost)).call("work", within=5))


@pytest.mark.parametrize("own", [OSError("/models/ActorNet: no config.json"), RuntimeError("no ActorCritic here")])
def test_an_actors_own_error_is_no_death_whatever_it_speaks_of(own: Exception) -> None:
    with pytest.raises(type(own), match="Actor"):
        asyncio.run(handle_of(Actor(own)).call("work", within=5))


def test_a_death_during_a_call_that_will_never_answer_is_noticed() -> None:
    handle = handle_of(Actor(), {"restarts": 0, "given_up": False}, {"restarts": 1, "given_up": False})
    with pytest.raises(ActorRestarted, match="restart 1"):
        asyncio.run(handle.call("hang", within=5))


def test_a_call_without_an_answer_ends_with_what_was_asked() -> None:
    with pytest.raises(RunFailed, match="did not answer `hang` within 1 s"):
        asyncio.run(handle_of(Actor()).call("hang", within=0.5001))


def test_one_that_was_given_up_ends_the_run() -> None:
    with pytest.raises(RunFailed, match="died 11 times within 60 minutes"):
        asyncio.run(handle_of(Actor(), {"restarts": 11, "given_up": True}).call("hang", within=5))


@pytest.mark.parametrize(("apart", "given_up"), [(1.0, True), (module.WINDOW_SECONDS / MAX_RESTARTS, False)])
def test_an_actor_is_given_up_for_dying_often_in_a_short_time_only(
    monkeypatch: pytest.MonkeyPatch, apart: float, given_up: bool
) -> None:
    clock, retried = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module, "in_background", lambda scheduler, function: retried.append(function))
    supervisor = ActorSupervisor()
    supervisor.scheduler = SimpleNamespace(tasks={"one": SimpleNamespace(actor=True)})  # type: ignore[assignment]
    for _ in range(MAX_RESTARTS + 1):
        supervisor.transition("one", "memory", "erred", stimulus_id="")
        clock[0] += apart
    assert supervisor.count("one") == {"restarts": MAX_RESTARTS + 1, "given_up": given_up}
    assert len(retried) == MAX_RESTARTS + (not given_up)


def test_an_actor_that_cannot_be_made_is_not_made_again() -> None:
    supervisor = ActorSupervisor()
    supervisor.scheduler = SimpleNamespace(tasks={"one": SimpleNamespace(actor=True)})  # type: ignore[assignment]
    supervisor.transition("one", "processing", "erred", stimulus_id="")
    assert supervisor.count("one") == {"restarts": 0, "given_up": False}
