"""The experience row of a finished trajectory: pure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from laminar.rollout.engine import Generated
from laminar.trajectory import Score, TrajectoryRequest, Version

__all__ = ["Story", "row_of"]


@dataclass(slots=True)
class Story:
    """What happened to one trajectory besides its tokens. Times in Unix seconds."""

    started_at: float = 0.0
    weight_version: Version = 0
    finish_version: Version = 0
    replica: str = ""
    migrations: int = 0
    run_id: int = -1


def row_of(
    request: TrajectoryRequest, generated: Generated, score: Score, story: Story, *, text: str
) -> dict[str, Any]:
    """All columns of one trajectory, by name. One that is dropped has no reward, whatever the scorer said."""
    dropped = drop_reason(generated, score)
    return {
        "trajectory_id": request.id,
        "group_id": request.group,
        "prompt_id": request.prompt.id,
        "sample": request.sample,
        "group_size": request.group_size,
        "weight_version": story.weight_version,
        "finish_version": story.finish_version,
        "prompt_ids": list(request.prompt_ids),
        "response_ids": list(generated.ids),
        "logprobs": list(generated.logprobs),
        "loss_mask": [1] * len(generated.ids),
        "reward": None if dropped else score.reward,
        "reward_parts": score.parts,
        "finish_reason": generated.finish_reason,
        "drop_reason": dropped,
        "message": generated.message or score.message,
        "turns": 1,
        "prompt_text": request.prompt.text,
        "response_text": text,
        "queued_at": request.queued_at,
        "started_at": story.started_at,
        "first_token_at": generated.first_token_at,
        "finished_at": time.time(),
        "environment_seconds": score.seconds,
        "replica": story.replica,
        "migrations": story.migrations,
        "temperature": request.sampling.temperature,
        "attempt_run_id": story.run_id,
    }


def drop_reason(generated: Generated, score: Score) -> str | None:
    """Why a row is dropped on arrival, or None if it can be trained on.

    >>> drop_reason(Generated("g0-0", [1], [0.0], "stop"), Score(reward=None, status="timeout"))
    'reward_timeout'
    >>> drop_reason(Generated("g0-0", [1], [0.0], "length"), Score(reward=0.0)) is None
    True
    """
    if generated.finish_reason in ("error", "abort") or not generated.ids:
        return "generation_error"
    return None if score.status == "ok" else f"reward_{score.status}"
