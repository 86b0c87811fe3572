"""What a user's code raised, in one line."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["described"]


def described(error: BaseException) -> str:
    """An exception in one line, with the innermost place in the user's own code that it came from.

    The function and not the file: code that travelled by value has forgotten its file.

    Example
    -------
    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    text = " ".join(f"{type(error).__name__}: {_text(error)}".split())[:400]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(Path(frame.filename))]
    return f"{text} (in {frames[-1].name}, line {frames[-1].lineno})" if frames else text


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a user's __str__
        return "(its text cannot be had)"


def _is_users(file: Path) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    installed = (Path(sysconfig.get_paths()["stdlib"]), Path(__file__).parents[1])
    return "site-packages" not in file.parts and not any(file.is_relative_to(folder) for folder in installed)
