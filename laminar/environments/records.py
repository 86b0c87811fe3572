"""Reads a JSONL or Parquet file, here or at a URL, into rows; every fault of the file is one clear line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from laminar.errors import UserError

__all__ = ["SUFFIXES", "Records", "read_records"]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@dataclass(frozen=True)
class Records:
    """A file's rows, all with the same columns (null where a JSON line lacks one), and a hash of its bytes."""

    columns: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    digest: str


def read_records(url: str) -> Records:
    """Read the whole of a file. Its kind is told by its suffix; ``.json`` is JSON lines, or one list of objects.

    Raises
    ------
    UserError
        The file cannot be read, is of another kind, is broken (with the line), or has no rows.
    """
    import xxhash

    content = _content(url)
    rows = _parquet(content, url) if url.endswith(".parquet") else _json(content, url)
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        raise UserError(f"data set {url} is empty; expected at least one row")
    whole = tuple({name: row.get(name) for name in columns} for row in rows)
    return Records(columns=columns, rows=whole, digest=xxhash.xxh3_128_hexdigest(content))


def _content(url: str) -> bytes:
    import fsspec

    if PurePosixPath(url).suffix not in SUFFIXES:
        raise UserError(f"data set {url}: expected a file that ends with one of {', '.join(SUFFIXES)}")
    try:
        with fsspec.open(url, "rb") as file:
            return bytes(file.read())
    except FileNotFoundError as error:
        why = f" ({_one_line(error.__cause__)})" if error.__cause__ else ""  # of HTTP: what the server said
        raise UserError(f"data set {url}: no such file{why}") from error
    except Exception as error:  # drivers of remote stores raise errors of their own kinds
        raise UserError(f"data set {url} cannot be read: {_one_line(error)}") from error


def _parquet(content: bytes, url: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise UserError(f"data set {url} is no valid Parquet file: {_one_line(error)}") from error


def _json(content: bytes, url: str) -> list[dict[str, Any]]:
    """JSON by the standard library, not Arrow's reader: that one turns strings that look like dates into dates."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"data set {url}, line {line}: not UTF-8 text ({error.reason})") from error
    if url.endswith(".json"):
        if text.lstrip().startswith("["):
            return [_object(row, url, f"item {number}") for number, row in enumerate(_list(text, url), start=1)]
        if _is_one_object(text):
            raise UserError(f"data set {url} is one JSON object; expected a list of objects, or an object on each line")
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    return [_object(_line(line, url, number), url, f"line {number}") for number, line in lines]


def _list(text: str, url: str) -> Iterable[Any]:
    try:
        return list(json.loads(text))
    except json.JSONDecodeError as error:
        raise UserError(f"data set {url}, line {error.lineno}: broken JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"data set {url}: JSON that cannot be read ({_one_line(error)})") from error


def _is_one_object(text: str) -> bool:
    """Whether a text is one JSON object over several lines."""
    if "\n" not in text.strip():
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _line(line: str, url: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"data set {url}, line {number}: broken JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"data set {url}, line {number}: JSON that cannot be read ({_one_line(error)})") from error


def _object(value: Any, url: str, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"data set {url}, {place}: expected a JSON object, got {type(value).__name__}")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
