"""The objective: clipped policy gradient per token, corrected for who really drew the token.

With, for one token of a trajectory of advantage ``A``,

- ``logprob``: the policy being updated, which carries the gradient;
- ``proximal``: the same policy at the start of the step, before any update of it;
- ``behaviour``: what the engine said when it drew the token, maybe some versions ago;

the loss is ``- w * min(r * A, clip(r, 1 - low, 1 + high) * A)``, where ``r = exp(logprob - proximal)`` and
``w = min(exp(proximal - behaviour), cap)``. Where each part is from:

===================================  ====================================================================
``min(r A, clip(r) A)``              PPO (arXiv 1707.06347), equation 7
``A`` from the group                 GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1
``high > low`` (clip-higher)         DAPO (arXiv 2503.14476), section 3.1
mean over the batch's tokens         DAPO, section 3.3 (not over each row first)
``proximal`` apart from behaviour    batch-size invariance (arXiv 2110.00641), section 3; for stale data
                                     AReaL (arXiv 2505.24298), section 5.2
``w`` with its cap                   truncated importance sampling, Ionides 2008; between engine and
                                     trainer, "Your efficient RL framework secretly brings you off-policy
                                     RL training" (Yao et al. 2025)
===================================  ====================================================================

Tensors here are ``[tokens]``: the tokens that count, of all rows of a micro-batch, without any padding. So
nothing in this file can depend on padding or on how rows were put together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from laminar.trainer.config import GRPO

__all__ = ["Totals", "importance_weights", "token_losses"]


def importance_weights(proximal: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """Weight of each token, ``[tokens]``, detached: how much likelier the trainer finds it than who drew it.

    Example
    -------
    >>> log = torch.tensor([0.5, 0.25, 0.9]).log()
    >>> importance_weights(log, torch.tensor([0.5, 0.5, 0.1]).log(), cap=2.0)
    tensor([1.0000, 0.5000, 2.0000])
    """
    if cap is None:
        return torch.ones_like(proximal)
    return (proximal - behaviour).detach().exp().clamp(max=cap)


def token_losses(logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, config: GRPO) -> Tensor:
    """Loss of each token, ``[tokens]``. The caller sums and divides by the tokens of the whole batch.

    Example
    -------
    >>> same = torch.tensor([-1.0, -2.0])
    >>> token_losses(same, same, same, torch.tensor([1.0, -1.0]), GRPO())
    tensor([-1.,  1.])
    """
    ratio = (logprobs - proximal.detach()).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    weights = importance_weights(proximal, behaviour, config.importance_cap)
    return -weights * torch.minimum(ratio * advantages, clipped * advantages)


@dataclass(slots=True)
class Totals:
    """Sums over tokens, so that any split into micro-batches gives the same figures.

    ``ratio`` is ``exp(proximal - behaviour)`` before the cap; ``kl`` estimates KL(engine || trainer) by
    ``ratio - 1 - log ratio`` (the "k3" of Schulman 2020, "Approximating KL divergence"): unbiased and never
    negative.
    ``truncated`` counts tokens above the cap, ``clipped`` those whose gradient the clip removed.
    """

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    truncated: float = 0.0

    def add(self, other: Totals) -> None:
        """Take in the figures of another micro-batch."""
        largest = max(self.ratio_max, other.ratio_max)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.ratio_max = largest

    def mean(self, name: str) -> float:
        """One of the sums, per token."""
        return float(getattr(self, name)) / max(self.tokens, 1)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        losses: Tensor,
        entropy: Tensor,
        logprobs: Tensor,
        proximal: Tensor,
        behaviour: Tensor,
        advantages: Tensor,
        config: GRPO,
    ) -> Totals:
        """Figures of one micro-batch; all arguments ``[tokens]``."""
        log_ratio = (proximal - behaviour).double()
        ratio = log_ratio.exp()
        policy_ratio = (logprobs - proximal).exp()
        clipped = torch.where(
            advantages > 0, policy_ratio > 1 + config.clip_high, policy_ratio < 1 - config.clip_low
        ) & (advantages != 0)
        cap = config.importance_cap if config.importance_cap is not None else float("inf")
        return cls(
            tokens=losses.numel(),
            loss=losses.double().sum().item(),
            entropy=entropy.double().sum().item(),
            kl=(ratio - 1 - log_ratio).sum().item(),
            ratio=ratio.sum().item(),
            ratio_max=ratio.max().item(),
            clipped=clipped.sum().item(),
            truncated=(ratio > cap).sum().item(),
        )
