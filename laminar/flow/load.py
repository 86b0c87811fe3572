"""Finding a flow: ``FILE[:FLOW]`` to the object that ``@lm.flow`` made."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

import cloudpickle

from laminar.errors import LaminarError, UserError
from laminar.flow.flow import Flow
from laminar.suggest import nearest

__all__ = ["load_flow"]


def load_flow(reference: str) -> Flow:
    """Import a flow file and take a flow from it.

    Parameters
    ----------
    reference
        ``flow.py``, or ``flow.py:name`` where the file has more than one.

    Raises
    ------
    UserError
        No such file, it cannot be imported, or it has no such flow.
    """
    if reference.startswith("-"):
        raise UserError(f"expected a flow's FILE first and its options after it, as flow.py {reference} …")
    file, colon, name = reference.rpartition(":")
    if not colon or Path(reference).is_file():  # a path may have a colon, too
        file, name = reference, ""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"there is no file {file!r}; expected FILE or FILE:FLOW, as flow.py:quickstart")
    module = _import(path.resolve())
    flows = {item.name: item for item in vars(module).values() if isinstance(item, Flow)}
    own = {key: item for key, item in flows.items() if item.function.__module__ == module.__name__}
    return _choose(file, name, own or flows)


def _choose(file: str, name: str, flows: dict[str, Flow]) -> Flow:
    if not flows:
        raise UserError(f"{file} has no flow; write @lm.flow above a function")
    listed = ", ".join(f"{file}:{flow}" for flow in flows)
    if name and name not in flows:
        close = nearest(name, flows)
        raise UserError(f"{file} has no flow {name!r}; {f'did you mean {close!r}? ' if close else ''}It has: {listed}")
    if not name and len(flows) > 1:
        raise UserError(f"{file} has {len(flows)} flows; name one: {listed}")
    return flows[name] if name else next(iter(flows.values()))


def _import(path: Path) -> ModuleType:
    """Import a file under a name of its own, and have what it defines travel to workers by value.

    Workers cannot import it. Dask pickles by reference where it can, unless the pickle mentions ``__main__``:
    then it asks cloudpickle, which was told of this module. Hence the module's name.
    """
    name = f"laminar__main__{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=None)
    if spec is None or spec.loader is None:
        raise UserError(f"{path.name} is not a Python file; expected one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:  # as `python flow.py` does
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except LaminarError:
        raise
    except SyntaxError as error:
        where = f"{Path(error.filename or path).name}:{error.lineno}"
        raise UserError(f"{where}: syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise UserError(_why(path, error)) from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _why(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path.name}:{lines[-1]}" if lines else path.name
    return f"{where} raised {type(error).__name__}: {' '.join(str(error).split())}"
