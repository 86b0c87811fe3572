"""Engines by name. Each is imported when asked for, so that nothing heavy is loaded for the others."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from laminar.errors import UserError
from laminar.rollout.engine import Engine

__all__ = ["KINDS", "create_engine"]

KINDS = {
    "transformers": ("laminar.rollout.engines.transformers", "TransformersEngine"),
    "emulated": ("laminar.rollout.engines.emulated", "EmulatedEngine"),
}


def create_engine(kind: str, model: str, **options: Any) -> Engine:
    """An engine, not yet started.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    model
        Folder of a checkpoint in Hugging Face format.
    options
        Of the engine's constructor.

    Example
    -------
    >>> create_engine("transformer", "models/base")
    Traceback (most recent call last):
        ...
    laminar.errors.UserError: unknown engine 'transformer'; did you mean 'transformers'? Known: transformers, emulated
    """
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UserError(f"unknown engine {kind!r}{hint} Known: {', '.join(KINDS)}")
    module, name = KINDS[kind]
    engine: Engine = getattr(import_module(module), name)(model, **options)
    return engine
