"""The conductor's way to the trainer: submits the actor, calls it, and starts it again where it was lost."""

from __future__ import annotations

import time
from typing import Any, Protocol

from distributed import Client, Future, Worker, fire_and_forget

from laminar.errors import RunFailed
from laminar.flow.context import RunContext
from laminar.post_train import PostTrainSpec
from laminar.trajectory import Version
from laminar.watch.events import Level
from laminar_dask.emulated_trainer import EmulatedTrainer
from laminar_dask.stage import trainer_settings
from laminar_dask.supervisor import ActorHandle, ActorRestarted
from laminar_dask.trainer import Trainer

__all__ = ["TrainerLink"]

START_DEADLINE = 900.0
"""Seconds to load a model and its optimizer, also where the process has to be started anew first."""
STEP_DEADLINE = 3600.0
"""Seconds of one optimizer step, or of the last checkpoint."""


class Say(Protocol):
    """Tells the user a line."""

    def __call__(self, text: str, *, level: Level = "info") -> None: ...


class TrainerLink:
    """Calls the trainer.

    Attributes
    ----------
    step, version
        Optimizer steps done and the version held, as it said last.
    """

    def __init__(self, handle: ActorHandle, say: Say) -> None:
        self.handle = handle
        self.say = say
        self.step = 0
        self.version: Version = 0

    @classmethod
    async def submit(
        cls, client: Client, worker: Worker, spec: PostTrainSpec, context: RunContext, model: str, *, say: Say
    ) -> TrainerLink:
        """Have the actor made, or find the one that is there; it is not started yet."""
        settings, emulation = trainer_settings(spec, context, model), spec.rollouts.emulation
        emulated = spec.rollouts.emulated
        future = client.submit(
            EmulatedTrainer if emulated else Trainer,
            *((settings, emulation) if emulated else (settings,)),
            actor=True,
            resources={"trainer": 1},
            key=f"trainer-{context.run_id}",
            pure=False,
        )
        fire_and_forget(future)  # it outlives this client, should the data worker die
        handle = ActorHandle(future, worker, name="trainer")
        await handle.synchronise()
        return cls(handle, say)

    @property
    def future(self) -> Future:
        """To be cancelled at the end of the stage."""
        return self.handle.future

    async def start(self) -> None:
        """(Re)load the trainer; a restarted one begins at its newest checkpoint with a new version.

        One that was started already, by a conductor that died, may be busy with a step: that is waited for.
        """
        until = time.monotonic() + START_DEADLINE
        while True:
            try:
                started = (await self.handle.call("status", within=START_DEADLINE))["version"] >= 0
                state = await self.handle.call("start", within=STEP_DEADLINE if started else START_DEADLINE)
            except ActorRestarted as lost:
                self.say(str(lost), level="warning")
                if time.monotonic() > until:
                    raise RunFailed(f"the trainer could not be started for {START_DEADLINE:.0f} s: {lost}") from lost
                continue
            self.step, self.version = state["step"], state["version"]
            return

    async def train(self, groups: int, *, poll: float) -> dict[str, Any] | None:
        """One step, or the reason why there is none yet (``Trainer.train``); None if it was lost and starts anew."""
        try:
            report: dict[str, Any] = await self.handle.call("train", groups, poll=poll, within=STEP_DEADLINE)
        except ActorRestarted as lost:
            self.say(str(lost), level="warning")
            await self.start()
            return None
        if report["status"] == "trained":
            self.step, self.version = report["step"], report["version"]
        return report

    async def save(self) -> str:
        """The final checkpoint; its URL."""
        while True:
            try:
                return str(await self.handle.call("save", final=True, within=STEP_DEADLINE))
            except ActorRestarted as lost:
                self.say(str(lost), level="warning")
                await self.start()
