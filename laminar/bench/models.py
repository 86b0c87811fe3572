"""Models made on the spot for measuring: what they say does not matter, how long they talk does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

__all__ = ["BASE", "talkative_model"]

BASE = Path(__file__).parents[2] / "flows" / "models" / "running-sums"
"""The committed base model (0.8 M parameters)."""


def talkative_model(folder: Path, *, mean_tokens: int, longest: int) -> Path:
    """A model of the base's architecture with random weights, whose answers have geometric lengths.

    A random model draws every token of its vocabulary about equally often, the stop token too, so that the size of
    the vocabulary is the mean length of an answer.

    Parameters
    ----------
    folder
        Where the checkpoint is written.
    mean_tokens, longest
        Mean answer length before the cut, and the longest sequence, in tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for file in BASE.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            shutil.copy(file, folder)
    config = json.loads((BASE / "config.json").read_text())
    config |= {"vocab_size": mean_tokens, "max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder
