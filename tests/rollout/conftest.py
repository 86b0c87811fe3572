"""A random model of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.rollout.answers import Answers

VOCABULARY = 60
POSITIONS = 512


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a random Qwen3 model: ``make_checkpoint(seed=0, eos=None)``. Weights are large enough that the
    greedy choice is clear of rounding."""

    def make(seed: int = 0, eos: int | list[int] | None = None) -> Path:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        model = Qwen3ForCausalLM(config)
        model.generation_config.eos_token_id = eos
        path = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """A random model without a stop token."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Qwen3ForCausalLM:
    """The model of ``checkpoint`` for plain forward passes."""
    return Qwen3ForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()


@pytest.fixture
def answers() -> Answers:
    return Answers()
