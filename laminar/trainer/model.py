"""The model: loaded from a Hugging Face folder, and asked for the logprobs of tokens that were drawn."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laminar.trainer.batching import MicroBatch

__all__ = ["load_model", "local_folder", "served_tensors", "token_logprobs", "tokenizer_files"]

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


def served_tensors(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What an engine needs, by name: parameters, tied ones once, and persistent buffers; detached.

    Floating-point tensors come in the served type; where that is float32 nothing is copied.
    """
    tensors = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True).keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {
        name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        for name, tensor in tensors.items()
    }


def token_logprobs(
    model: Any, batch: MicroBatch, *, temperature: float, dtype: torch.dtype, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprob of each token that counts, and the entropy of the distribution it was drawn from.

    Both are of the distribution sampled from: ``log_softmax(logits / temperature)``, in float32. Logits are
    made only from the first position that any row needs.

    Parameters
    ----------
    temperature
        Of the sampling, > 0.
    dtype
        Type that matrix products are computed in.
    entropy_gradient
        Whether the entropy carries a gradient; without, it costs no memory.

    Returns
    -------
    Logprobs and entropy, each ``[tokens]``, in nats.
    """
    first = int(batch.position.min()) - 1
    with _autocast(batch.input_ids.device, dtype):
        logits = model(
            input_ids=batch.input_ids,
            use_cache=False,
            logits_to_keep=batch.input_ids.shape[1] - first,
        ).logits
    drawn_from = logits[batch.row, batch.position - 1 - first].float() / temperature
    log_probs = drawn_from.log_softmax(dim=-1)
    drawn = batch.input_ids[batch.row, batch.position]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, drawn[:, None])[:, 0], entropy


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
