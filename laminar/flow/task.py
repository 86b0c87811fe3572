"""``@lm.task``: a function that is a node of a flow's graph, and whose result is kept in the run store."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from laminar.errors import UserError
from laminar.flow.functions import check_plain
from laminar.flow.trace import current

if TYPE_CHECKING:
    from laminar.flow.kept import Identity

__all__ = ["Task", "task"]

P = ParamSpec("P")
R = TypeVar("R")


class Task(Generic[P, R]):
    """A function that ``@lm.task`` made a task.

    Called inside a flow it gives a Dask ``Delayed``; called anywhere else it just runs.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[P, R]) -> None:
        check_plain("task", function)
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function or, inside a flow, add a node that will."""
        trace = current()
        if trace is None:
            return self.function(*args, **kwargs)
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:
            raise UserError(f"task `{self.__name__}`: {error}") from error
        bound.apply_defaults()
        node: Any = trace.task(self.identity, self.function, bound.args, bound.kwargs)
        return node  # type: ignore[no-any-return]  # a Delayed that stands for an R

    @functools.cached_property
    def identity(self) -> Identity:
        """Name and hash of its code."""
        from laminar.flow.kept import identity_of

        return identity_of(self.function)

    def __repr__(self) -> str:
        return f"<task {self.__name__}>"


def task(function: Callable[P, R]) -> Task[P, R]:
    """Make a function a task.

    Its result is kept in the run store by its code, its inputs and this package's version: a second run skips
    it and says so. So it must depend on nothing else.

    Raises
    ------
    UserError
        It is no plain function: a class, a generator, or ``async``.
    """
    return Task(function)
