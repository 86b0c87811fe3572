"""What a user sets of the streaming stage: rollouts, evaluation; and what it gives back.

Each field's description is its documentation. Sizes are counted in trajectories everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from laminar.rollout.emulation import EMULATED, Emulation
from laminar.trainer.config import UserConfig
from laminar.trajectory import Sampling

__all__ = ["Evaluation", "Policy", "Rollouts"]


class Rollouts(UserConfig):
    """The rollout side: how many replicas, of which engine, and how they sample."""

    replicas: int = Field(2, ge=1, description="Rollout replicas; each is a worker process with one engine.")
    engine: Literal["transformers", "emulated"] = Field("transformers", description="What generates.")
    slots: int = Field(128, ge=1, description="Most trajectories that one replica runs at once.")
    temperature: float = Field(1.0, gt=0.0, le=4.0, description="Sampling temperature in training.")
    max_new_tokens: int = Field(256, ge=1, description="Longest answer in tokens; longer ones are cut.")
    kv_tokens: int = Field(65536, ge=256, description="KV cache of one replica, in tokens.")
    threads: int = Field(1, ge=1, description="CPU threads of one engine.")
    score_deadline: float = Field(10.0, gt=0.0, description="Seconds after which a reward call is killed.")
    repack: bool = Field(True, description="Move the long tail onto few replicas, so that the others go on.")
    emulation: Emulation = Field(default_factory=Emulation, description="What an emulated engine is like.")

    @property
    def emulated(self) -> bool:
        """Whether there is no model."""
        return self.engine == EMULATED


@dataclass(frozen=True)
class Evaluation:
    """Held-out results of one version, sampled at the training temperature and greedily."""

    reward_mean: float
    greedy_accuracy: float
    prompts: int
    version: int
    step: int
    response_length_mean: float = 0.0


@dataclass(frozen=True)
class Policy:
    """A trained policy: where its checkpoint lies and which run made it."""

    checkpoint: str
    """URL of a Hugging Face folder: ``AutoModelForCausalLM.from_pretrained`` loads it."""
    version: int
    run_id: str
    step: int
    sampling: Sampling = field(default_factory=Sampling, repr=False)
    """How it sampled in training."""
    score_deadline: float = field(default=10.0, repr=False)
    """Seconds that a reward call had in training."""
    evaluations: dict[str, Evaluation] = field(default_factory=dict, repr=False)
    """Evaluations of just these weights, by the fingerprint of their prompts."""
    summary: dict[str, Any] = field(default_factory=dict, repr=False)
