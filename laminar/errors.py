"""The errors that a user meets. Each is one line: what was given, what was expected, what to do."""

from __future__ import annotations

__all__ = ["LaminarError", "RunFailed", "UserError"]


class LaminarError(Exception):
    """Base class of the errors that end a command with one line and no traceback."""

    exit_code = 1


class UserError(LaminarError):
    """The input was wrong: an option, a file, a column, a reward function. The command exits with 2."""

    exit_code = 2


class RunFailed(LaminarError):
    """The run could not go on. What it had is kept; the message says why and how to resume. Exits with 1."""
