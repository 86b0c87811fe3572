"""Values as plain JSON: what ``run.json``, ``summary.json`` and ``--json`` say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import PurePath
from typing import Any

__all__ = ["as_plain"]


def as_plain(value: Any) -> Any:
    """A value made of dicts, lists, strings, finite numbers, booleans and None only.

    A decimal number becomes an integer where it is one, else the nearest float. NaN and the infinities, which JSON
    has not, become None; what has no plain form becomes its ``repr``.

    Example
    -------
    >>> as_plain({"lr": 1e-4, "path": PurePath("a/b"), "loss": float("nan"), 1: (2, {3})})
    {'lr': 0.0001, 'path': 'a/b', 'loss': None, '1': [2, [3]]}
    >>> as_plain([Decimal("2560"), Decimal("0.25")])
    [2560, 0.25]
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    return _object_as_plain(value)


def _object_as_plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else as_plain(float(value))
    if isinstance(value, date):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if not isinstance(value, type) and callable(getattr(value, "model_dump", None)):  # pydantic
        return as_plain(value.model_dump())
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return as_plain(value.item())
    return repr(value)
