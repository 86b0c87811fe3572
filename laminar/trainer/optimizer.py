"""AdamW as the configuration describes it, and its state as it goes into a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from laminar.trainer.config import AdamW

__all__ = ["build_optimizer", "optimizer_state", "restore_optimizer", "set_learning_rate"]


def build_optimizer(model: Any, config: AdamW) -> torch.optim.AdamW:
    """AdamW that decays matrices only. Fused: the plain one takes memory for another copy of the weights on a GPU."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Learning rate of the next update, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Running means by parameter. The settings are not part of it: a run resumes with those it is given."""
    return dict(optimizer.state_dict()["state"])


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take up the running means of a checkpoint, keeping the optimizer's own settings."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": settings})
