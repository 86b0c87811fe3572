"""What is looked at before a run starts: that the model, the environments and the prompts are what they have to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from laminar.environments.described import described
from laminar.environments.environment import Environment
from laminar.errors import UserError
from laminar.flow.trace import Pending
from laminar.rollout.emulation import is_emulated
from laminar.rollout.tokens import encode, load_tokenizer

__all__ = ["check_kind", "check_model", "max_length", "prompt_lengths"]

_KINDS: dict[type, str] = {
    str: "a checkpoint folder",
    Environment: "an environment, such as lm.dataset(…) or lm.reasoning_gym(…)",
}
"""What a user calls a type, where that is not its name."""


def check_kind(owner: str, name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Refuse a value that is of none of ``kinds``; one that is not known yet passes.

    Raises
    ------
    UserError
        It is of another.

    Example
    -------
    >>> check_kind("post_train", "model", 5, (str,))
    Traceback (most recent call last):
    laminar.errors.UserError: post_train: model is a int (5); expected a checkpoint folder
    """
    if not isinstance(value, (*kinds, Pending)):
        shown = " ".join(repr(value).split())
        wanted = " or ".join(_KINDS.get(kind, f"a {kind.__name__}") for kind in kinds if kind is not Path)
        given = "None" if value is None else f"a {type(value).__name__} ({shown[:57]}{'...' if shown[57:] else ''})"
        raise UserError(f"{owner}: {name} is {given}; expected {wanted}")


def check_model(model: str) -> None:
    """A model is a folder with a config, weights and a tokenizer; say so early if it is not."""
    folder = Path(model)
    expected = "expected a Hugging Face checkpoint folder with config.json, *.safetensors and tokenizer.json"
    if not folder.is_dir():
        raise UserError(f"model {model!r}: no such folder; {expected}")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        raise UserError(f"model {model!r}: {', '.join(missing)} not found; {expected}")
    max_length(model)


def max_length(model: str) -> int:
    """Longest sequence in tokens that a checkpoint's config allows.

    Raises
    ------
    UserError
        The config cannot be read.
    """
    if is_emulated(model):
        return 1 << 30
    file = Path(model) / "config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings", 1 << 30))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"model {model!r}: config.json cannot be read ({described(error)}); save the model again"
        ) from error


def prompt_lengths(model: str, environment: Environment, count: int) -> dict[str, int]:
    """Tokens of the first ``count`` prompts, by the prompts' ids.

    Raises
    ------
    UserError
        The tokenizer cannot be loaded, or cannot encode a prompt: its chat template refuses it, it is no text.
    """
    try:
        tokenizer = load_tokenizer(model)
    except Exception as error:  # the tokenizers' library raises bare exceptions
        raise UserError(f"model {model!r}: its tokenizer cannot be loaded: {described(error)}") from error
    lengths: dict[str, int] = {}
    for index in range(count):
        prompt = environment.prompt(index)
        try:
            lengths[prompt.id] = len(encode(tokenizer, prompt))
        except Exception as error:  # a chat template is a program and may raise anything
            raise UserError(
                f"prompt `{prompt.id}` of `{environment.name}` cannot be encoded by the tokenizer of {model!r}: "
                f"{described(error)}"
            ) from error
    return lengths
