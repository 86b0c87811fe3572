"""What one optimizer step says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["StepReport"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one step. Those of tokens are means over the tokens that count, whatever the micro-batches.

    Parameters
    ----------
    loss, entropy, grad_norm, learning_rate
        Mean loss and entropy (nats) of a token; gradient norm before clipping (mean over the mini-batches).
    kl
        Estimate of KL(engine || trainer), nats a token.
    importance_ratio_mean, importance_ratio_max
        Trainer's probability of a token over that of the engine that drew it, before the cap.
    clip_fraction, truncated_fraction
        Tokens whose gradient the clip removed; tokens whose importance weight was capped.
    reward_mean, reward_std, groups_without_signal
        Over rows; groups whose rewards are all equal, which teach nothing.
    rows, groups, tokens, microbatches
        Size of the batch; tokens are those that the loss counts.
    staleness_mean, staleness_max
        Version being updated minus the version that generated the row.
    response_length_mean, response_length_max
        Tokens.
    skipped_updates
        Updates of this step left out because the loss or the gradient was not finite.
    seconds
        Of the whole step.
    """

    loss: float
    entropy: float
    grad_norm: float
    learning_rate: float
    kl: float
    importance_ratio_mean: float
    importance_ratio_max: float
    clip_fraction: float
    truncated_fraction: float
    reward_mean: float
    reward_std: float
    groups_without_signal: int
    rows: int
    groups: int
    tokens: int
    microbatches: int
    staleness_mean: float
    staleness_max: int
    response_length_mean: float
    response_length_max: int
    skipped_updates: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Field by field, plain values."""
        return asdict(self)
