"""Text to token ids and back, once each: a prompt is encoded when it is drawn, an answer decoded to be scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar.rollout.emulation import PROMPT_TOKENS, EmulatedTokenizer, is_emulated
from laminar.trajectory import Prompt

__all__ = ["decode", "encode", "load_tokenizer", "stop_ids"]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a checkpoint folder, or one of counts where there is no model. Never looks on a hub.

    It is told of all tokens that end an answer of this model, as there may be several.
    """
    if is_emulated(model):
        return EmulatedTokenizer(int(model.partition(":")[2] or PROMPT_TOKENS))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)  # type: ignore[no-untyped-call]
    tokenizer.ends_answer = _ends_answer(Path(model))
    return tokenizer


def encode(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt: a user's turn where the tokenizer has a chat template, else the bare text."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return tuple(tokenizer(prompt.text, verbose=False)["input_ids"])


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that only end or fill a sequence and are no part of the answer's text."""
    known = frozenset(i for i in (tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None)
    return known | getattr(tokenizer, "ends_answer", frozenset())


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of an answer, without the tokens that end it. For scoring and for people; never encoded again."""
    end = len(ids)
    stops = stop_ids(tokenizer)
    while end and ids[end - 1] in stops:
        end -= 1
    return str(tokenizer.decode(list(ids[:end]), skip_special_tokens=False))


def _ends_answer(model: Path) -> frozenset[int]:
    """Every id that ends an answer, as an engine sees it: of the generation config, else of the model's."""
    for name in ("generation_config.json", "config.json"):
        file = model / name
        config = json.loads(file.read_text()) if file.exists() else {}
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
