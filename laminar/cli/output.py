"""What a command prints: tables for people, or one JSON object and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from laminar.errors import LaminarError
from laminar.flow.plain import as_plain

__all__ = ["Failure", "only_json", "print_error", "print_json", "print_table", "print_values"]


class Failure(Exception):
    """An error with what ``--json`` is to say besides its text."""

    def __init__(self, text: str, exit_code: int, answer: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.text = text
        self.exit_code = exit_code
        self.answer = dict(answer)

    @classmethod
    def of(cls, error: LaminarError, **answer: Any) -> Failure:
        """From an error of ours."""
        return cls(str(error), error.exit_code, answer)


@contextmanager
def only_json() -> Iterator[TextIO]:
    """The real stdout, while whatever else is written to stdout goes to stderr.

    The file descriptor itself is turned, so that it holds for processes started meanwhile too.
    """
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    before, sys.stdout = sys.stdout, sys.stderr
    try:
        with open(real, "w", encoding="utf-8", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout = before
        os.dup2(real, 1)
        os.close(real)


def print_json(answer: Mapping[str, Any], file: TextIO) -> None:
    """One object on one line."""
    print(json.dumps(as_plain(answer)), file=file, flush=True)


def print_error(text: str) -> None:
    """One line on stderr."""
    print(f"laminar-flow: {text}", file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """Rows for people, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    table.show_header = any(columns)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    Console(highlight=False).print(table)


def print_values(values: Mapping[str, Any], *, title: str) -> None:
    """Names and values for people."""
    if values:
        rows = [(name, "none" if value is None else value) for name, value in values.items()]
        print_table(["", ""], rows, title=title)


def shown(value: Any) -> str:
    """A cell's text.

    >>> shown(0.123456), shown(None), shown(["a", 1])
    ('0.1235', '', 'a, 1')
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(item) for item in value)
    return "" if value is None else str(value)
