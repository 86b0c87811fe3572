"""The model: loaded from a Hugging Face folder, and its weights as an engine wants them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ServedTensors", "load_model", "local_folder", "tokenizer_files"]

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def local_folder(model: str) -> Path:
    """Folder of a model that is one already, or that the hub has by this name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


def load_model(folder: Path, device: torch.device) -> Any:
    """A causal language model in float32, whatever its files hold.

    In float32 because updates at the usual learning rates are smaller than the distance of two bfloat16
    numbers; ``token_logprobs`` lowers the precision of the computation instead. Dropout is off, as in the
    engine, so that the importance ratio is 1 at equal weights.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # workers share the terminal of the run's own progress
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(device).eval()


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files of a model, by name: copied into each checkpoint as they are."""
    paths = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    return {path.name: path.read_bytes() for path in sorted(paths) if path.is_file()}


class ServedTensors(Mapping[str, Tensor]):
    """What an engine needs, by name: parameters, tied ones once, and persistent buffers; detached.

    Floating-point tensors are brought to the served type when they are asked for, one at a time, so that
    publishing a model needs no room for a second one. Where that type is theirs nothing is copied.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        kept = model.state_dict(keep_vars=True).keys()
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
        self._tensors: dict[str, Tensor] = dict(model.named_parameters()) | buffers
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
