"""A micro Qwen3 model with random weights, and rows as the experience table leases them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from laminar.trainer.learner import Learner

VOCABULARY = 96


def save_model(folder: Path) -> Path:
    """Write the model, and a file in the place of its tokenizer's; returns the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def rows(
    sizes: tuple[int, ...] = (4, 3, 2, 4), *, seed: int = 0, learner: Learner | None = None, version: int = 3
) -> pa.Table:
    """Groups of the given sizes with random tokens and rewards.

    Logprobs are the learner's own, or else noise around those of a uniform distribution.
    """
    random = np.random.default_rng(seed)
    groups = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
    prompts = [random.integers(0, VOCABULARY, random.integers(2, 12)).tolist() for _ in groups]
    responses = [random.integers(0, VOCABULARY, random.integers(1, 40)).tolist() for _ in groups]
    if learner is None:
        logprobs = [(-4.5 + random.normal(0, 1, len(response))).tolist() for response in responses]
    else:
        logprobs = learner.token_logprobs(prompts, responses)
    return pa.table(
        {
            "trajectory_id": pa.array([f"{group}-{index}" for index, group in enumerate(groups)]),
            "group_id": pa.array(groups),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "logprobs": pa.array(logprobs, pa.list_(pa.float32())),
            "loss_mask": pa.array([[1] * len(response) for response in responses], pa.list_(pa.int8())),
            "reward": pa.array(random.random(len(groups)), pa.float32()),
            "finish_reason": pa.array(["length" if len(response) > 30 else "stop" for response in responses]),
            "weight_version": pa.array([version - index % 2 for index in range(len(groups))], pa.int64()),
        }
    )
