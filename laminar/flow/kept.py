"""Results of tasks kept in the run store, so that a second run skips what did not change.

A result is found by what made it: the task's code, its inputs, and the version of this package. The code is
the function's source together with the functions, classes and constants of the same file that it uses; code
that it imports is taken to be what it was.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import cloudpickle
import xxhash

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
    digest = xxhash.xxh3_128()
    for part in _code_of(function, seen=set()):
        digest.update(part.encode() + b"\0")
    return Identity(function.__name__, digest.hexdigest())


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


def _code_of(value: Any, seen: set[str]) -> Iterator[str]:
    """Source of a function or class, then of what it uses from its own file."""
    yield _source(value)
    used = _used_by(value)
    for name in sorted(used.keys() - seen):
        seen.add(name)
        item = inspect.unwrap(used[name]) if callable(used[name]) else used[name]
        if not (inspect.isfunction(item) or isinstance(item, type)):
            yield f"{name} = {_constant(item)}"
        elif item.__module__ == value.__module__:
            yield from _code_of(item, seen)
        else:
            yield f"{name}: {item.__module__}.{item.__qualname__}"


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # built by exec: no file has it
        return "\n".join(f"{code.co_code.hex()} {_constant(code.co_consts)}" for code in _codes(value))


def _used_by(value: Any) -> dict[str, Any]:
    """The global and enclosing variables whose names a function or a class's methods mention."""
    names = {name for code in _codes(value) for name in code.co_names}
    if inspect.isfunction(value):
        enclosing = inspect.getclosurevars(value).nonlocals
        return {**{name: item for name, item in value.__globals__.items() if name in names}, **enclosing}
    module = sys.modules.get(value.__module__)
    return {name: item for name, item in vars(module).items() if name in names} if module else {}


def _codes(value: Any) -> Iterator[types.CodeType]:
    """All code objects of a function or of a class's methods, nested ones too."""
    members = [value] if inspect.isfunction(value) else vars(value).values()
    waiting = [member.__code__ for member in members if inspect.isfunction(member)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def _constant(item: Any) -> str:
    """A plain value as text; of anything else only its type: an object's state is not code."""
    return json.dumps(item, default=lambda other: type(other).__qualname__, skipkeys=True)
