"""What an emulated replica is like, and how emulated weights travel: a number in a file instead of tensors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from pydantic import Field

from laminar.trainer.config import UserConfig
from laminar.trajectory import Version

__all__ = ["EMULATED", "EmulatedTokenizer", "EmulatedVersions", "Emulation", "is_emulated"]

EMULATED = "emulated"
"""The model's name where there is no model; ``emulated:300`` has prompts of 300 tokens."""
PROMPT_TOKENS = 300
HELD = 3
"""Newest versions that can still be loaded, as a relay's slots."""


def is_emulated(model: str) -> bool:
    """Whether a model's name says that there is none.

    >>> is_emulated("emulated:200"), is_emulated("models/base")
    (True, False)
    """
    return model.partition(":")[0] == EMULATED


class Emulation(UserConfig):
    """Replicas without a model: times from measured tables, lengths from quantiles. Seconds are emulated ones."""

    model: str = Field("32B", description="Whose decode latencies: 7B, 32B.")
    tensor_parallel: int = Field(4, ge=1, description="GPUs of one replica, of the latency table.")
    workload: str = Field("32B math", description="Whose response lengths: see `data/response_tokens.csv`.")
    lengths: str | None = Field(None, description="Parquet file with real lengths (column `tokens`), instead.")
    group_correlation: float = Field(0.0, ge=0, lt=1, description="How alike the lengths of a group are.")
    prefill_tokens_per_second: float = Field(25_000.0, gt=0, description="Prefill alone.")
    prefill_chunk: int = Field(
        512, ge=0, description="Tokens of a prefill that ride on a decode step; 0: decoding stops during a prefill."
    )
    load_seconds: float = Field(1.0, ge=0, description="Loading a weight version.")
    tool_calls: int = Field(0, ge=0, description="Most tool calls of a trajectory, with sandbox latencies.")
    train_seconds: float = Field(300.0, gt=0, description="One step of the emulated trainer.")
    time_scale: float = Field(1.0, gt=0, description="Emulated seconds in one real one.")
    seed: int = Field(0, ge=0, description="Seed of lengths and tool waits.")


class EmulatedTokenizer:
    """Stands in for a tokenizer. An emulated id is a number of tokens: one id of 300 is a prompt of 300 tokens."""

    chat_template = None
    eos_token_id = None
    pad_token_id = None

    def __init__(self, prompt_tokens: int = PROMPT_TOKENS) -> None:
        self.prompt_tokens = prompt_tokens

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.prompt_tokens]}

    def decode(self, ids: Any, **options: Any) -> str:
        """There is no text."""
        return ""


class EmulatedVersions:
    """Publishes and reads the newest version below the run's root: what a relay is to real weights."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "emulated-version"

    def publish(self, version: Version, *, step: int = 0) -> None:
        """Make a version the newest, whole or not at all; ``step`` is the optimizer step that made it."""
        self.root.mkdir(parents=True, exist_ok=True)
        staged = self.file.with_suffix(".new")
        staged.write_text(f"{version} {step}")
        staged.replace(self.file)

    def step(self) -> int:
        """Step of the newest version; 0 before the first."""
        return self._read()[1]

    def newest(self) -> Version | None:
        """None before the first."""
        return self._read()[0]

    def _read(self) -> tuple[Version | None, int]:
        with contextlib.suppress(FileNotFoundError):
            version, step = self.file.read_text().split()
            return int(version), int(step)
        return None, 0

    def held(self) -> list[Version]:
        """The versions that can be loaded, newest last."""
        newest = self.newest()
        return [] if newest is None else list(range(max(0, newest - HELD + 1), newest + 1))
