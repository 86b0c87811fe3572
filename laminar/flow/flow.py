"""``@lm.flow``: a function whose calls make a Dask graph, and whose parameters are options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laminar.errors import UserError
from laminar.flow.context import new_run_id
from laminar.flow.docstring import summary_of
from laminar.flow.functions import check_plain

if TYPE_CHECKING:
    from laminar.flow.graph import Graph
    from laminar.flow.parameters import Parameter
    from laminar.flow.plan import Plan
    from laminar.flow.results import RunResult

__all__ = ["Flow", "flow"]


class Flow:
    """A function that ``@lm.flow`` made a flow. It is not called: ``run``, ``check`` and ``graph`` take its
    parameters as keyword arguments, and ``laminar-flow`` as options."""

    __name__: str

    def __init__(self, function: Callable[..., Any]) -> None:
        check_plain("flow", function)
        functools.update_wrapper(self, function)
        self.function = function
        self.name = function.__name__

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        return summary_of(self.function.__doc__)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, from the function's signature and docstring."""
        from laminar.flow.parameters import parameters_of

        return parameters_of(self.function)

    def run(self, *, store: str = "runs", run_id: str | None = None, quiet: bool = False, **params: Any) -> RunResult:
        """Run the flow on a cluster of its own on this machine.

        Parameters
        ----------
        store
            Path or URL of the run store.
        run_id
            The run's name; by default a new one.
        quiet
            Show no progress.

        Raises
        ------
        UserError
            A parameter, a setting or the store is not as it must be; found before any process starts.
        RunFailed
            The run could not go on.
        """
        from laminar.flow.run import execute

        display = None
        if not quiet:
            from laminar.watch.progress import Progress

            display = Progress()
        return execute(self, params, store=store, run_id=run_id, display=display)

    def check(self, *, store: str = "runs", **params: Any) -> Plan:
        """Resolve and check everything that can be known beforehand; start nothing.

        Raises
        ------
        UserError
            Something is not as it must be.
        """
        plan = self._plan(store, params)
        plan.check()
        return plan

    def graph(self, **params: Any) -> Graph:
        """The flow's nodes and what they depend on: text when printed, a drawing in a notebook."""
        from laminar.flow.graph import Graph

        return Graph(self.name, self._plan("runs", params).trace.nodes)

    def _plan(self, store: str, params: dict[str, Any]) -> Plan:
        from laminar.flow.plan import plan

        return plan(self, params, store=store, run_id=new_run_id())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, since it would be unclear what ran where."""
        raise UserError(f"flow `{self.name}` is not called: use `{self.name}.run(…)` or laminar-flow run")

    def __repr__(self) -> str:
        return f"<flow {self.name}({', '.join(parameter.name for parameter in self.parameters)})>"


def flow(function: Callable[..., Any]) -> Flow:
    """Make a function a flow: its typed parameters are options, its calls make a Dask graph.

    Raises
    ------
    UserError
        It is no plain function: a class, a generator, or ``async``.
    """
    return Flow(function)
