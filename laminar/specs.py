"""What ``post_train`` and ``evaluate`` are told: their fields, what is checked beforehand, what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from laminar.checks import check_kind, check_model, max_length, prompt_lengths
from laminar.environments.environment import Environment
from laminar.errors import UserError
from laminar.experience.evictors import Evictor, capacity, equal_rewards, older_than
from laminar.experience.samplers import Rules, named
from laminar.flow.trace import Pending
from laminar.rollout.emulation import is_emulated
from laminar.schedules import backlog_limit
from laminar.settings import Policy, Rollouts
from laminar.trainer.config import GRPO, AdamW, UserConfig

__all__ = ["EvaluateSpec", "PostTrainSpec"]

CHECKED_PROMPTS = 512
"""Prompts whose length is looked at before a model loads; a data set up to this size is checked whole."""


class PostTrainSpec(UserConfig):
    """Everything that ``post_train`` takes; sizes in trajectories."""

    title = "post_train"

    model: Any = Field(description="A Hugging Face checkpoint folder, or the Policy of an earlier stage.")
    environment: Any = Field(description="Where prompts and rewards come from.")
    algorithm: GRPO = Field(default_factory=GRPO, description="Loss and advantages.")
    optimizer: AdamW = Field(default_factory=AdamW, description="Optimizer and its learning rate.")
    rollouts: Rollouts = Field(default_factory=Rollouts, description="Replicas and sampling.")
    steps: int = Field(ge=1, description="Optimizer steps (weight updates) to make.")
    batch_size: int = Field(128, ge=1, description="Trajectories that one step trains on.")
    staleness_ceiling: int | None = Field(
        None,
        ge=0,
        description="Most updates between generating and training on a row; 0 is on-policy; none: off.",
    )
    sampling: Any = Field(
        "fifo", description="Which groups are trained on first: 'fifo', 'freshest', lm.priority(…) or a function."
    )
    dynamic_sampling: bool = Field(
        False, description="Evict groups whose rewards are all equal; others are generated in their place."
    )
    evict_after: float | None = Field(None, gt=0, description="Seconds after which a group not trained on is evicted.")
    capacity: int | None = Field(
        None, ge=1, description="Most trajectories that may wait to be trained on; beyond it the oldest are evicted."
    )
    evict: Any = Field(None, description="A function of your own that says which groups to evict and why.")
    epochs: int | None = Field(
        None, ge=1, description="How often each prompt is drawn before the run ends; none: as often as steps need."
    )
    prompt_priority: Any = Field(
        None, description="A function of a prompt; in each epoch those with the highest value come first."
    )
    evaluate_on: Any = Field(None, description="Held-out prompts, evaluated at the start, the end and between.")
    evaluate_every: int = Field(0, ge=0, description="Steps between evaluations; 0: only at start and end.")
    checkpoint_every: int = Field(20, ge=1, description="Steps between checkpoints.")
    overlong_prompts: Literal["error", "drop"] = Field(
        "error", description="What a prompt too long for the model is: an error before the start, or dropped."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of training and serving.")
    max_tokens_per_microbatch: int = Field(8192, ge=16, description="Padded tokens of one forward pass.")
    trainer_threads: int = Field(1, ge=1, description="CPU threads of the trainer.")
    trajectory_deadline: float = Field(
        300.0, gt=0, description="Seconds after which one trajectory is given up, counted and replaced."
    )
    seed: int = Field(0, ge=0, description="Seed of prompt order, sampling and training.")

    @property
    def groups(self) -> int:
        """Prompts of one step."""
        return self.batch_size // self.algorithm.group_size

    @property
    def feed(self) -> int:
        """Groups that a replica takes at once: the replicas share one batch."""
        return max(1, -(-self.groups // self.rollouts.replicas))

    def check(self) -> None:
        """Find what is wrong before any model loads.

        Raises
        ------
        UserError
            One line: what was given, what was expected, what to do.
        """
        self.rules()
        size = self.algorithm.group_size
        if self.batch_size % size:
            near = [n for n in (self.batch_size // size * size, -(-self.batch_size // size) * size) if n]
            raise UserError(
                f"batch_size={self.batch_size} is not a multiple of group_size={size}; "
                f"set batch_size to {' or '.join(map(str, near))}"
            )
        self.check_kinds()
        environments = [one for one in (self.environment, self.evaluate_on) if isinstance(one, Environment)]
        for environment in environments:
            environment.check(self.rollouts.score_deadline)
        if isinstance(self.environment, Environment) and len(self.environment) < self.groups:
            raise UserError(
                f"the data set `{self.environment.name}` has {len(self.environment)} prompts, one step needs "
                f"{self.groups} (batch_size={self.batch_size} / group_size={size}); give more prompts or a smaller "
                "batch_size"
            )
        if isinstance(self.model, str | Path) and not self.rollouts.emulated:
            check_model(str(self.model))
            for environment in environments:
                self._check_lengths(environment)

    def check_kinds(self) -> None:
        """Look at what may be the result of another node: before the start where it is known, and when it is."""
        check_kind("post_train", "model", self.model, (str, Path, Policy))
        check_kind("post_train", "environment", self.environment, (Environment,))
        if self.evaluate_on is not None:
            check_kind("post_train", "evaluate_on", self.evaluate_on, (Environment,))
        if is_emulated(str(self.model)) != self.rollouts.emulated and not isinstance(self.model, Pending | Policy):
            raise UserError(
                f"model {str(self.model)!r} with engine={self.rollouts.engine!r}: an emulated engine has the model "
                "'emulated', and only it; set both or none"
            )

    def rules(self) -> Rules:
        """How groups are chosen to be trained on. UserError for a sampling that there is not."""
        evictors: list[Evictor] = []
        if self.evict_after is not None:
            evictors.append(older_than(self.evict_after))
        if self.dynamic_sampling:
            evictors.append(equal_rewards)
        for name in ("sampling", "evict", "prompt_priority"):
            function = getattr(self, name)
            if not (function is None or callable(function) or (name == "sampling" and isinstance(function, str))):
                raise UserError(f"post_train: {name} is a {type(function).__name__}; expected a function")
        if self.evict is not None:
            evictors.append(self.evict)
        if self.capacity is not None:
            if self.capacity < self.batch_size:
                raise UserError(
                    f"capacity={self.capacity} is less than batch_size={self.batch_size}: no batch would ever fill; "
                    "raise it"
                )
            evictors.append(capacity(self.capacity))
        return Rules(named(self.sampling), tuple(evictors))

    def _check_lengths(self, environment: Environment) -> None:
        room = self.prompt_room()
        count = min(len(environment), CHECKED_PROMPTS)
        lengths = prompt_lengths(str(self.model), environment, count)
        long = {name: length for name, length in lengths.items() if length > room}
        if long and (self.overlong_prompts == "error" or len(long) == count):
            name, length = max(long.items(), key=lambda item: item[1])
            raise UserError(
                f"{len(long)} of {count} prompts of `{environment.name}` are too long: `{name}` has {length} tokens, "
                f"room is {room} (model length {max_length(str(self.model))} or kv_tokens={self.rollouts.kv_tokens}, "
                f"less max_new_tokens={self.rollouts.max_new_tokens}); lower max_new_tokens, shorten them, or set "
                "overlong_prompts='drop'"
            )

    def prompt_room(self) -> int:
        """Longest prompt in tokens that leaves room for the answer."""
        limit = min(max_length(str(self.model)), self.rollouts.kv_tokens)
        return limit - self.rollouts.max_new_tokens

    def derived(self) -> dict[str, object]:
        """The sizes that follow from what was set; printed before a run."""
        size = self.algorithm.group_size
        limit = backlog_limit(batch_size=self.batch_size, staleness_ceiling=self.staleness_ceiling)
        return {
            "trajectories per step": self.batch_size,
            "prompts per step": self.groups,
            "samples per prompt": size,
            "trajectories in all": self.batch_size * self.steps,
            "prompts a replica takes at once": self.feed,
            "trajectories under way at most": limit,
            "staleness ceiling": "none" if self.staleness_ceiling is None else self.staleness_ceiling,
            "schedule": "synchronous, on-policy" if self.staleness_ceiling == 0 else "trajectory-level asynchronous",
        }

    def needs(self) -> dict[str, Any]:
        """Roles that the cluster must offer."""
        return {"replicas": self.rollouts.replicas, "slots": self.rollouts.slots, "trainer": True}


class EvaluateSpec(UserConfig):
    """Everything that ``evaluate`` takes."""

    title = "evaluate"

    policy: Any = Field(description="What ``post_train`` returned.")
    prompts: Any = Field(description="Held-out prompts with their scorer.")

    def check(self) -> None:
        """Try the scorer before anything starts."""
        self.check_kinds()
        if isinstance(self.prompts, Environment):
            self.prompts.check()

    def check_kinds(self) -> None:
        """Look at what may be the result of another node: before the start where it is known, and when it is."""
        check_kind("evaluate", "policy", self.policy, (Policy,))
        check_kind("evaluate", "prompts", self.prompts, (Environment,))

    def derived(self) -> dict[str, object]:
        """How many trajectories it costs."""
        count = len(self.prompts) if isinstance(self.prompts, Environment) else "known when its task has run"
        return {"held-out prompts": count, "samples per prompt": "1 at the training temperature, 1 greedy"}

    def needs(self) -> dict[str, Any]:
        """Nothing of its own: the replicas of the training stage serve it."""
        return {}
