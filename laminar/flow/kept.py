"""Results of tasks kept in the run store, so that a second run skips what did not change.

A result is found by what made it: the task's code, its inputs, and the version of this package. The code is
the function with the functions, classes, objects and constants that it uses, also from files beside its own; what is
installed counts by its name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import cloudpickle
import xxhash

from laminar.environments.fingerprint import fingerprint
from laminar.environments.pickling import is_installed
from laminar.flow.store import read_bytes, write_bytes

__all__ = ["Identity", "Kept", "Unreadable", "Unwritable", "identity_of", "read", "result_key", "write"]


@dataclass(frozen=True)
class Identity:
    """A task's name and a hash of its code."""

    name: str
    code: str


@dataclass(frozen=True)
class Kept:
    """A result and the run that computed it."""

    run_id: str
    result: Any


class Unreadable(Exception):
    """A kept result is there and cannot be loaded."""


class Unwritable(Exception):
    """A result cannot be pickled or stored."""


def identity_of(function: Callable[..., Any]) -> Identity:
    """Name and code of a task's function.

    Example
    -------
    >>> identity_of(identity_of).name, identity_of(identity_of) == identity_of(result_key)
    ('identity_of', False)
    """
    file = inspect.getsource(sys.modules[function.__module__]) if is_installed(function.__module__) else ""
    return Identity(function.__name__, fingerprint(function, file))


def result_key(identity: Identity, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Under which name a result is kept: ``<task>-<hash of code, inputs and package version>``."""
    from dask.base import tokenize

    inputs = tokenize(args, kwargs)
    made_of = f"{identity.code} {inputs} {version('laminar-flow')}"
    return f"{identity.name}-{xxhash.xxh3_128_hexdigest(made_of.encode())}"


def read(store: str, key: str) -> Kept | None:
    """The kept result of this name, if there is one.

    Raises
    ------
    Unreadable
        What is there cannot be loaded.
    """
    try:
        data = read_bytes(_url(store, key))
        if data is None:
            return None
        run_id, result = cloudpickle.loads(data)
    except Exception as error:  # unpickling a damaged file can raise anything
        raise Unreadable(f"the kept result {_url(store, key)} cannot be read ({_brief(error)})") from error
    return Kept(run_id, result)


def write(store: str, key: str, kept: Kept) -> None:
    """Keep a result. The file is complete when it appears under its name.

    Raises
    ------
    Unwritable
        It cannot be pickled, or the store refuses it.
    """
    try:
        write_bytes(_url(store, key), cloudpickle.dumps((kept.run_id, kept.result)))
    except Exception as error:  # pickling runs the result's own code
        raise Unwritable(_brief(error)) from error


def _url(store: str, key: str) -> str:
    return f"{store}/tasks/{key}.pkl"


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
