"""What one optimizer step says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from laminar.trainer.advantages import groups_without_signal
from laminar.trainer.losses import Totals

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
    response_length_mean, response_length_max, cut_fraction
        Tokens; rows whose answer was cut at the longest length, by what the engine said.
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
    cut_fraction: float
    skipped_updates: int
    seconds: float

    @classmethod
    def of(
        cls,
        totals: Totals,
        norms: Sequence[float],
        *,
        rewards: npt.NDArray[np.float64],
        groups: Sequence[str],
        staleness: npt.NDArray[np.int64],
        lengths: Sequence[int],
        finish_reasons: Sequence[str],
        learning_rate: float,
        microbatches: int,
        seconds: float,
    ) -> Self:
        """The report from sums over tokens, a gradient norm an update (NaN: left out), and columns of the rows."""
        return cls(
            loss=totals.mean("loss"),
            entropy=totals.mean("entropy"),
            grad_norm=float(np.mean(norms)),
            learning_rate=learning_rate,
            kl=totals.mean("kl"),
            importance_ratio_mean=totals.mean("ratio"),
            importance_ratio_max=totals.ratio_max,
            clip_fraction=totals.mean("clipped"),
            truncated_fraction=totals.mean("truncated"),
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            groups_without_signal=groups_without_signal(rewards, groups),
            rows=len(rewards),
            groups=len(set(groups)),
            tokens=totals.tokens,
            microbatches=microbatches,
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            response_length_mean=float(np.mean(lengths)),
            response_length_max=max(lengths),
            cut_fraction=sum(reason == "length" for reason in finish_reasons) / len(finish_reasons),
            skipped_updates=sum(not math.isfinite(norm) for norm in norms),
            seconds=seconds,
        )

    def as_dict(self) -> dict[str, Any]:
        """Field by field, plain values."""
        return asdict(self)
