"""What a user sets of the trainer: the algorithm and the optimizer. Importing this loads no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from laminar.errors import UserError

__all__ = ["GRPO", "AdamW", "TrainerSettings", "UserConfig"]

Beta = Annotated[float, Field(ge=0, lt=1)]


class UserConfig(BaseModel):
    """Values that a user types: a wrong one is an error of one line that names the field, or the nearest."""

    title: ClassVar[str] = ""
    """What the user calls it, where that is not the class's name."""
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            raise UserError(_one_line(cls, error)) from None


class GRPO(UserConfig):
    """Group-relative policy optimisation with an asymmetric clip and truncated importance sampling.

    The objective and the source of each of its parts are in ``laminar.trainer.losses``.

    Example
    -------
    >>> GRPO(group_size=16).clip_high
    0.28
    >>> GRPO(groupsize=16)
    Traceback (most recent call last):
    laminar.errors.UserError: GRPO: unknown field 'groupsize', did you mean 'group_size'?
    """

    group_size: int = Field(
        default=8,
        ge=2,
        description="Answers sampled of each prompt; their rewards are compared with each other.",
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="How far below 1 the policy ratio of a token may fall before it is clipped.",
    )
    clip_high: float = Field(
        default=0.28,
        gt=0,
        description="How far above 1 the policy ratio of a token may rise before it is clipped.",
    )
    importance_cap: float | None = Field(
        default=2.0,
        ge=1,
        description="Largest weight given to a token for the trainer thinking it likelier than the engine "
        "that drew it (staleness, numerics). None trains without this correction.",
    )
    minibatches: int = Field(
        default=1,
        ge=1,
        description="Optimizer updates made of one batch; each takes an equal share of its rows.",
    )
    scale_advantages: Literal["std", "none"] = Field(
        default="std",
        description="Divide a group's advantages by the standard deviation of its rewards, or do not.",
    )
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the entropy bonus; 0 leaves it out of the loss."
    )


class AdamW(UserConfig):
    """AdamW with a linear warm-up and then a constant learning rate.

    Example
    -------
    >>> optimizer = AdamW(lr=1e-3, warmup_steps=4)
    >>> [optimizer.learning_rate(step) for step in (1, 2, 4, 100)]
    [0.00025, 0.0005, 0.001, 0.001]
    """

    lr: float = Field(default=1e-6, ge=0, lt=1, description="Learning rate after the warm-up.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="Decay of the running means of the gradient and of its square."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decoupled weight decay of matrices; biases and norms are never decayed.",
    )
    warmup_steps: int = Field(
        default=10, ge=0, description="Steps over which the learning rate grows to `lr`; 0 is none."
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Gradients of a larger global norm are scaled down to it."
    )

    def learning_rate(self, step: int) -> float:
        """Learning rate of an optimizer step, the first being 1."""
        return self.lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.lr


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """All that the trainer of one run has to know; small and picklable, it travels to the trainer's process.

    Parameters
    ----------
    run, run_url
        Run id, and the fsspec URL of its folder; checkpoints go below ``<run_url>/checkpoints``.
    model
        Folder or hub name of the base model, used where there is no checkpoint yet.
    temperature
        Sampling temperature of the rollouts (> 0): logprobs are those of the distribution sampled from.
    dtype
        Type that the model computes in and is served in. Weights and optimizer state are float32 throughout.
    max_tokens_per_microbatch
        Padded tokens (rows x longest row) of one forward pass.
    checkpoint_every, keep
        Steps between two checkpoints, and how many of them are kept.
    staleness_ceiling
        Largest number of versions that a row may be behind when it is trained on; None is no limit.
    threads
        CPU threads that torch uses for one operation.
    device
        Such as ``"cuda:0"``; None takes a GPU where there is one.
    """

    run: str
    run_url: str
    model: str
    algorithm: GRPO
    optimizer: AdamW
    temperature: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    max_tokens_per_microbatch: int = 8192
    checkpoint_every: int = 20
    keep: int = 2
    staleness_ceiling: int | None = None
    threads: int = 1
    device: str | None = None

    @property
    def checkpoints(self) -> str:
        """URL of the folder that holds the run's checkpoints."""
        return f"{self.run_url.rstrip('/')}/checkpoints"


def _one_line(config: type[UserConfig], error: ValidationError) -> str:
    """The first complaint of pydantic, in one line."""
    name = config.title or config.__name__
    first = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{name}: {field} is missing: {config.model_fields[field].description}"
    if first["type"] != "extra_forbidden":
        given = f"{field}={first['input']!r}" if field else repr(first["input"])
        return f"{name}: {given} is not valid: {first['msg'][:1].lower()}{first['msg'][1:]}"
    names = list(config.model_fields)
    near = difflib.get_close_matches(field, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(names)}"
    return f"{name}: unknown field '{field}', {hint}"
