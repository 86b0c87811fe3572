"""What travels along the eight steps: prompts, requests, scores. Token ids everywhere, never text re-encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Prompt", "Purpose", "Sampling", "Score", "ScoreStatus", "TrajectoryRequest", "Version"]

Version = int
Purpose = Literal["train", "evaluate"]
ScoreStatus = Literal["ok", "skipped", "error", "timeout"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem.

    Parameters
    ----------
    id
        Stable name within its environment, e.g. ``"chain_sum-17"``. Two prompts with the same text stay two.
    text
        What the model is asked; the user's turn where the tokenizer has a chat template.
    row
        Everything that the scorer needs (answer, metadata): plain, picklable values.
    """

    id: str
    text: str
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``temperature=0`` is greedy. There is no top-p or top-k: both would bias the
    importance ratio by the mass they cut off."""

    temperature: float = 1.0
    max_new_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Score:
    """What the environment says of one answer.

    ``reward`` is None when the row has to be dropped; ``status`` says why: the scorer returned None
    (``skipped``), raised (``error``) or ran past its deadline (``timeout``); ``message`` is one line.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    status: ScoreStatus = "ok"
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrajectoryRequest:
    """One trajectory to generate: the argument of the Dask task ``rollout-<run>-<group>-<sample>``.

    Parameters
    ----------
    group, group_size
        Group id (one prompt drawn once) and how many samples it has; a group is ready when all are in.
    environment
        Name under which the replicas know the environment that scores it.
    at_least
        Lowest weight version that may generate it (the staleness ceiling's gate); 0 means any.
    queued_at
        Unix seconds when it was handed to a replica.
    """

    run: str
    group: str
    sample: int
    group_size: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    environment: str
    purpose: Purpose = "train"
    at_least: Version = 0
    queued_at: float = 0.0

    @property
    def id(self) -> str:
        """``<group>-<sample>``: the trajectory's id in every table."""
        return f"{self.group}-{self.sample}"

    @property
    def key(self) -> str:
        """The Dask key. Stable, so a trajectory that moves or restarts keeps its Future."""
        prefix = "rollout" if self.purpose == "train" else "evaluate"
        return f"{prefix}-{self.run}-{self.id}"
