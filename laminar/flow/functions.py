"""What a decorator of ours may stand above: a plain function, whose call gives its result."""

from __future__ import annotations

import inspect
from typing import Any

from laminar.errors import UserError

__all__ = ["check_plain"]


def check_plain(what: str, function: Any) -> None:
    """Refuse what is called and has done nothing yet, and what is no function.

    Raises
    ------
    UserError
        It is a class, a generator, or ``async``.

    Example
    -------
    >>> check_plain("task", len)
    Traceback (most recent call last):
    laminar.errors.UserError: task `len` is a builtin_function_or_method; write it as a plain def
    """
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function):
        raise UserError(f"{what} `{name}` is a {_kind(function)}; write it as a plain def")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"{what} `{name}` is an async function; write it with a plain def")
    if inspect.isgeneratorfunction(function):
        raise UserError(f"{what} `{name}` is a generator function; have it return its result, such as a list")


def _kind(value: Any) -> str:
    return "class" if isinstance(value, type) else type(value).__name__
