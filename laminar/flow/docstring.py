"""Help texts out of a docstring, so that what a flow says of its parameters is written once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

__all__ = ["parameter_help", "summary_of"]


def summary_of(doc: str | None) -> str:
    """The first paragraph as one line.

    Example
    -------
    >>> summary_of('''Train on sums.
    ...
    ...     Slowly.''')
    'Train on sums.'
    """
    return " ".join(inspect.cleandoc(doc or "").partition("\n\n")[0].split())


def parameter_help(doc: str | None, names: Collection[str]) -> dict[str, str]:
    """What a docstring says of each parameter, as one line each.

    Understood are numpy's sections (a line with the name or names, the text indented below) and plain lines
    ``name: text``, also under ``Args:`` and with a type in brackets. Only ``names`` are looked for.

    Example
    -------
    >>> parameter_help('''Train.
    ...
    ... Parameters
    ... ----------
    ... steps, warm_up : int
    ...     Optimizer
    ...     steps.
    ... lr
    ...     Learning rate.
    ... ''', ["steps", "lr", "warm_up"])
    {'steps': 'Optimizer steps.', 'warm_up': 'Optimizer steps.', 'lr': 'Learning rate.'}
    >>> parameter_help('''Args:
    ...     seed (int): Of the prompts' order
    ...         and of nothing else.''', ["seed"])
    {'seed': "Of the prompts' order and of nothing else."}
    """
    lines = inspect.cleandoc(doc or "").splitlines()
    found: dict[str, str] = {}
    for index, line in enumerate(lines):
        headed, text = _head(line, names)
        if headed:
            body = " ".join([text, *_indented_below(lines, index)]).strip()
            found.update({name: body for name in headed if body and name not in found})
    return found


def _head(line: str, names: Collection[str]) -> tuple[list[str], str]:
    """The parameters that a line speaks of, and the text that it already has for them."""
    plain = re.match(r"\s*[*`]*(\w+)[*`]*(?: \([^)]*\))?: +(\S.*)", line)
    if plain and plain[1] in names and not _is_type(line):
        return [plain[1]], plain[2]
    listed = [name.strip(" `*") for name in line.partition(" : ")[0].split(",")]
    return (listed, "") if all(name in names for name in listed) else ([], "")


def _is_type(line: str) -> bool:
    """``name : int`` is numpy's way to give a type, not a text."""
    return re.match(r"\s*[\w, ]+ : ", line) is not None


def _indented_below(lines: list[str], index: int) -> list[str]:
    """The block under a line that is indented more than it; a blank line ends it."""
    margin = len(lines[index]) - len(lines[index].lstrip())
    block: list[str] = []
    for line in lines[index + 1 :]:
        if not line.strip() or len(line) - len(line.lstrip()) <= margin:
            break
        block.append(line.strip())
    return block
