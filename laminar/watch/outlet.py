"""Where a run is shown, which may be gone before the run is: a closed pipe, a terminal that hung up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, TextIO

__all__ = ["Outlet"]


class Outlet:
    """A file to write to; what nobody can read any more goes nowhere, and the program goes on.

    rich would end the program where it stands, which may be a thread that the run needs.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write a text, or nothing."""
        with self._or_nowhere():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Send what was written, or drop it."""
        with self._or_nowhere():
            self._file.flush()

    @contextlib.contextmanager
    def _or_nowhere(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):  # the file itself is turned: Python writes what is left when it ends
                os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
