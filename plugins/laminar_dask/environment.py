"""Worker half of an environment: its scorer, on every rollout worker, also on those that join later."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Worker, WorkerPlugin

from laminar.environments.scoring import Scorer
from laminar.trajectory import Prompt, Score
from laminar_dask._compat import has_role

__all__ = ["EnvironmentPlugin", "FullMarksPlugin", "environment_plugin_name"]


def environment_plugin_name(environment: str) -> str:
    """Name under which the worker keeps the plugin of an environment."""
    return f"laminar-environment-{environment}"


class EnvironmentPlugin(WorkerPlugin):
    """Scores answers in processes of their own, off the event loop.

    Parameters
    ----------
    name
        The environment's name in trajectory requests (its fingerprint).
    environment
        A ``laminar.Environment``.
    deadline
        Seconds after which a scoring call is killed.
    """

    def __init__(self, name: str, environment: Any, *, deadline: float) -> None:
        self.name = environment_plugin_name(name)
        self.environment = environment
        self.deadline = deadline
        self.scorer: Scorer | None = None

    def setup(self, worker: Worker) -> None:
        """Start the scoring process where trajectories run."""
        if has_role(worker, "rollout"):
            self.scorer = Scorer(self.environment, processes=1, deadline=self.deadline)

    async def teardown(self, worker: Worker) -> None:
        """End the scoring process."""
        if self.scorer is not None:
            await asyncio.to_thread(self.scorer.close)

    async def score(self, prompt: Prompt, response: str) -> Score:
        """Score one answer. Cancelling drops a call that still queues; one that runs ends by its deadline."""
        assert self.scorer is not None, "only rollout workers score"
        return await asyncio.wrap_future(self.scorer.score(prompt, response))


class FullMarksPlugin(WorkerPlugin):
    """Gives every answer a 1, at once: for emulated engines, whose answers have no text."""

    def __init__(self, name: str) -> None:
        self.name = environment_plugin_name(name)

    async def score(self, prompt: Prompt, response: str) -> Score:
        """Full marks."""
        return Score(reward=1.0)
