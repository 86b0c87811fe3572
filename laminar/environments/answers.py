"""Ready-made rewards, and how the answer is found in a response."""

from __future__ import annotations

import re
import threading
from typing import Any

from laminar.errors import UserError

__all__ = ["exact_match", "extract_answer", "math_equal"]

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_MATH_SECONDS = 5


def extract_answer(response: str) -> str:
    """The text in the last ``<answer>…</answer>`` of a response, or all of it where there is none; stripped.

    Example
    -------
    >>> extract_answer("3+4=7, so <answer> 7 </answer>.")
    '7'
    >>> extract_answer(" 7\\n")
    '7'
    """
    tagged = _ANSWER.findall(response)
    return str(tagged[-1] if tagged else response).strip()


def exact_match(response: str, answer: object) -> float:
    """1.0 if the answer extracted from the response is the row's answer, letter by letter; else 0.0.

    Raises
    ------
    ValueError
        The row has no answer.

    Example
    -------
    >>> exact_match("<answer>7</answer>", 7), exact_match("seven", "7")
    (1.0, 0.0)
    """
    return float(extract_answer(response) == _given(answer).strip())


def math_equal(response: str, answer: object) -> float:
    """1.0 if the response's answer equals the row's as mathematics, as ``0.5`` and ``\\frac{2}{4}`` do; else 0.0.

    Uses the package ``math-verify``. Its own time limit needs the main thread, where a scorer's process runs it;
    on another thread there is none, and the result is the same.

    Raises
    ------
    UserError
        ``math-verify`` is not installed.
    ValueError
        The row has no answer, or one that is no mathematics.
    """
    try:
        import math_verify
    except ImportError as error:
        raise UserError("math_equal needs the package math-verify; run: pip install math-verify") from error
    gold = _expressions(_given(answer), is_bare=True)
    if not gold:
        raise ValueError(f"the row's answer {answer!r} is no mathematical expression")
    found = _expressions(extract_answer(response), is_bare=_ANSWER.search(response) is not None)
    return float(math_verify.verify(gold, found, timeout_seconds=_seconds()))


def _given(answer: object) -> str:
    """A row's answer as text. None is no answer, and must not become the word."""
    if answer is None:
        raise ValueError("the row has no answer")
    return str(answer)


def _expressions(text: str, *, is_bare: bool) -> list[Any]:
    """What math-verify reads in ``text``: an expression on its own (``is_bare``), or one somewhere in a sentence."""
    from math_verify import parse

    readings = (f"${text}$", text) if is_bare else (text, f"${text}$")
    return list(parse(readings[0], parsing_timeout=_seconds()) or parse(readings[1], parsing_timeout=_seconds()))


def _seconds() -> int | None:
    """math-verify's time limit: it works by SIGALRM, so only on the main thread."""
    return _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
