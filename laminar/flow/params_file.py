"""``--params FILE``: a flow's parameters from JSON, TOML or YAML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.errors import UserError

__all__ = ["read_params"]


def read_params(path: str | Path) -> dict[str, Any]:
    """The names and values in a file.

    Raises
    ------
    UserError
        There is no such file, it cannot be parsed, or it is not a mapping of names to values.
    """
    path = Path(path)
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise UserError(f"--params {path}: expected a file that ends in {', '.join(_PARSERS)}")
    try:
        values = parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"--params {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--params {path} cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f'--params {path}: expected names and values, as {{"steps": 10}}; got {_kind(values)}')
    return {str(name): value for name, value in values.items()}


def _kind(values: Any) -> str:
    return "nothing" if values is None else f"a {type(values).__name__}"


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}
