"""The learner of a micro model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from laminar.trainer.config import GRPO, AdamW
from laminar.trainer.learner import Learner
from tests.trainer.micro import save_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_learner(model_folder: Path) -> Callable[..., Learner]:
    def make(*, budget: int = 8192, temperature: float = 1.0, lr: float = 1e-3, **algorithm: object) -> Learner:
        return Learner(
            model_folder,
            GRPO(**algorithm),
            AdamW(lr=lr, warmup_steps=0),
            temperature=temperature,
            seed=0,
            max_tokens_per_microbatch=budget,
        )

    return make
