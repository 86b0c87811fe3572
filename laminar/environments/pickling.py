"""Sends a user's code to other processes by value, so that they need not find the file that it came from."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle

__all__ = ["dumps_by_value", "is_installed", "revive"]

_registry = threading.RLock()


def is_installed(module: str) -> bool:
    """Whether other processes can import a module by its name: it is Python's, ours, or an installed package's.

    A flow file, a notebook and a module beside the flow file are not.

    Example
    -------
    >>> is_installed("json"), is_installed("laminar.errors"), is_installed("__main__")
    (True, True, False)
    """
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return False
    if top in sys.stdlib_module_names or top in ("laminar", "laminar_dask", "laminar_vllm"):
        return True
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        return loaded is not None
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def dumps_by_value(value: object, *, owner: Any) -> bytes:
    """Pickle ``value`` with the code of the module that ``owner`` (a function or class) is defined in.

    Raises
    ------
    TypeError, pickle.PicklingError
        Something that the code refers to cannot be pickled, e.g. a lock in a global variable.
    """
    module = sys.modules.get(owner.__module__)
    if module is None or is_installed(owner.__module__) or owner.__module__ == "__main__":
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    with _registry:
        known = owner.__module__ in cloudpickle.list_registry_pickle_by_value()
        if not known:
            cloudpickle.register_pickle_by_value(module)
        try:
            return cloudpickle.dumps(value)  # type: ignore[no-any-return]
        finally:
            if not known:
                cloudpickle.unregister_pickle_by_value(module)


def revive(payload: bytes) -> Any:
    """Undo ``dumps_by_value`` of a ``(class, state)`` pair: a new object with that state."""
    cls, state = pickle.loads(payload)
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made
