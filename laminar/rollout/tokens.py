"""Text to token ids and back, once each: a prompt is encoded when it is drawn, an answer decoded to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laminar.rollout.emulation import PROMPT_TOKENS, EmulatedTokenizer, is_emulated
from laminar.trajectory import Prompt

__all__ = ["decode", "encode", "load_tokenizer", "stop_ids"]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a checkpoint folder, or one of counts where there is no model. Never looks on a hub."""
    if is_emulated(model):
        return EmulatedTokenizer(int(model.partition(":")[2] or PROMPT_TOKENS))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)  # type: ignore[no-untyped-call]


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
    return frozenset(i for i in (tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of an answer, without the tokens that end it. For scoring and for people; never encoded again."""
    end = len(ids)
    stops = stop_ids(tokenizer)
    while end and ids[end - 1] in stops:
        end -= 1
    return str(tokenizer.decode(list(ids[:end]), skip_special_tokens=False))
