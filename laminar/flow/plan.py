"""What a run would do, known before anything starts: resolved parameters, the traced graph, derived sizes."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import LaminarError, UserError
from laminar.flow.context import RunContext
from laminar.flow.parameters import resolve
from laminar.flow.store import absolute
from laminar.flow.trace import Trace

if TYPE_CHECKING:
    from dask.delayed import Delayed

    from laminar.flow.flow import Flow

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """A traced flow, ready to be checked and run."""

    flow: Flow
    parameters: dict[str, Any]
    context: RunContext
    trace: Trace
    output: Delayed
    """Done when every node is; its value is what the flow's function returned."""

    def check(self) -> None:
        """Ask every stage whether its settings can work.

        Raises
        ------
        UserError
            What is wrong, and what to do.
        """
        for node in self.trace.nodes:
            if node.spec is not None:
                node.spec.check()

    def derived(self) -> dict[str, dict[str, object]]:
        """The sizes that follow from the settings, by stage."""
        return {node.name: dict(node.spec.derived()) for node in self.trace.nodes if node.spec is not None}

    def needs(self) -> dict[str, Any]:
        """Fields of ``laminar.cluster.Needs``."""
        return self.trace.needs()


def plan(flow: Flow, params: Mapping[str, Any], *, store: str, run_id: str) -> Plan:
    """Resolve a flow's parameters and trace its function.

    Raises
    ------
    UserError
        A parameter is wrong, or the function raises while it is traced.
    """
    values = resolve(flow.name, flow.parameters, params)
    context = RunContext.of(absolute(store), flow.name, run_id)
    trace = Trace(context)
    with trace.active():
        try:
            value = flow.function(**values)
        except LaminarError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(_why(flow, error)) from error
    return Plan(flow, values, context, trace, trace.output(value))


def _why(flow: Flow, error: BaseException) -> str:
    """What the flow's function raised, and on which of its lines."""
    file = flow.function.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{Path(file).name}:{lines[-1]}" if lines else file
    text = " ".join(str(error).split())
    if "Delayed" in text:
        text += "; inside a flow a task's result is not known yet: use it in another task"
    return f"flow `{flow.name}` raised {type(error).__name__} at {where}: {text}"
