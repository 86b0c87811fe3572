"""A hash of values and of code that is the same in every process, so that results can be kept under it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from laminar.environments.pickling import is_installed

__all__ = ["fingerprint"]

_CONTAINERS = (set, frozenset, dict, list, tuple)


def fingerprint(*values: object) -> str:
    """32 hex digits over values and code.

    A function counts by its bytecode, its defaults and closure, and by the functions and constants of its own file
    that it uses: an edited helper gives another fingerprint, a moved or commented function does not. A module beside
    that file counts by its whole text, installed code by its name. An object of another kind counts by its type and
    attributes.

    Example
    -------
    >>> fingerprint(1, "a", {"x": {3, 2}}) == fingerprint(1, "a", {"x": {2, 3}})
    True
    """
    digest = xxhash.xxh3_128()
    for part in _parts(values, _Walk()):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class _Walk:
    """Where a walk over values stands, so that it ends.

    Parameters
    ----------
    above
        Identities of the values that hold this one.
    told
        Identities of the functions, classes and objects met so far. They are told once: functions that use each
        other would be walked along every path otherwise, and there are as many as the factorial of their number.
    """

    above: frozenset[int] = frozenset()
    told: set[int] = field(default_factory=set)

    def into(self, value: object) -> _Walk:
        """One step further down."""
        return _Walk(self.above | {id(value)}, self.told)

    def apart(self) -> _Walk:
        """The same place, for one of several walks whose order must not matter."""
        return _Walk(self.above, set(self.told))


def _parts(value: Any, walk: _Walk) -> Iterator[str]:
    """Text that identifies ``value``, piece by piece."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in walk.above:
        yield "seen"
        return
    walk = walk.into(value)
    yield f"{type(value).__qualname__} {len(value) if isinstance(value, _CONTAINERS) else ''}"
    if isinstance(value, (set, frozenset)):
        yield from sorted("\0".join(_parts(item, walk.apart())) for item in value)
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _parts(key, walk)
            yield from _parts(value[key], walk)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item, walk)
    elif id(value) in walk.told:
        yield f"told {getattr(value, '__qualname__', '')}"
    else:
        walk.told.add(id(value))
        yield from _object_parts(value, walk)


def _object_parts(value: Any, walk: _Walk) -> Iterator[str]:
    """Code and objects; what is installed counts by its name alone."""
    if isinstance(value, types.CodeType):
        yield value.co_code.hex()
        yield from _parts([value.co_names, value.co_varnames, value.co_consts], walk)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
        if not is_installed(value.__name__):  # beside the flow file: which of it is used cannot be told
            yield inspect.getsource(value)
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, value.args, value.keywords], walk)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _parts(value.__func__, walk)
    elif isinstance(value, property):
        yield from _parts([value.fget, value.fset], walk)
    elif isinstance(value, type):
        yield _called(value)
        if not is_installed(value.__module__):
            body = {name: vars(value)[name] for name in vars(value) if _is_written(name, vars(value)[name])}
            yield from _parts([value.__bases__, body], walk)
    elif isinstance(value, types.FunctionType):
        yield _called(value)
        if not is_installed(value.__module__ or ""):
            yield from _function_parts(value, walk)
    elif isinstance(value, types.MethodType):
        yield from _parts([value.__func__, value.__self__], walk)
    elif isinstance(value, types.BuiltinFunctionType):
        yield _called(value)
    elif hasattr(value, "__wrapped__"):  # a task, or what functools.cache made
        yield from _parts(inspect.unwrap(value), walk)
    elif hasattr(value, "__dict__"):
        yield from _parts([type(value), value.__dict__], walk)
    else:
        shown = repr(value)
        yield type(value).__qualname__ if " at 0x" in shown else shown


def _called(value: Any) -> str:
    """The name of code; with its module where that is the same for everybody."""
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{value.__qualname__}" if is_installed(module) else str(value.__qualname__)


def _is_written(name: str, value: object) -> bool:
    """Whether a class attribute is the author's code or constant, and not bookkeeping of Python's."""
    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
        return True
    return not name.startswith("_") and isinstance(value, (bool, int, float, str, tuple))


def _function_parts(function: types.FunctionType, walk: _Walk) -> Iterator[str]:
    """A user's function, with the globals that it names where they are functions, constants or modules."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    yield from _parts([function.__code__, function.__defaults__, function.__kwdefaults__, cells, used], walk)


def _names(code: types.CodeType) -> set[str]:
    """Names that code and the functions inside it look up."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*(_names(const) for const in inner))
