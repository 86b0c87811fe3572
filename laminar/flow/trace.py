"""Tracing: while a flow's function runs, what it calls becomes nodes of a Dask graph instead of running.

Called outside a flow, a task just runs; a stage (``post_train``, ``evaluate``) is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from laminar.errors import UserError
from laminar.flow.context import RunContext
from laminar.flow.holes import take_out

if TYPE_CHECKING:
    from dask.delayed import Delayed

    from laminar.flow.kept import Identity

__all__ = ["NodeInfo", "Pending", "StageSpec", "Trace", "current", "stage"]

STAGE_RESOURCES = {"data": 1.0}
"""A stage runs on the data worker, one at a time: two would share the same replicas."""

TASK_RESOURCES = {"task": 1.0}
"""A task runs there too, beside a stage, one at a time."""

GLUE_RESOURCES = {"data": 0.0}
"""Picking an attribute of a result and the like: on the data worker, whatever it is doing."""


class StageSpec(Protocol):
    """Settings of a stage: what is checked, printed and asked of the cluster before anything starts."""

    def check(self) -> None:
        """Raise ``UserError`` on what is wrong; no model is loaded."""

    def derived(self) -> dict[str, object]:
        """The sizes that follow from the settings."""

    def needs(self) -> dict[str, Any]:
        """Fields of ``laminar.cluster.Needs``."""


@dataclass(frozen=True)
class Pending:
    """Stands in a stage's settings for a value that is known only when another node has run."""

    node: str


@dataclass(frozen=True)
class NodeInfo:
    """One node of a flow, in the order of the calls.

    Parameters
    ----------
    name
        The task's or stage's name; a second one of that name is ``evaluate-2``.
    key
        Its Dask key: unique to the run, and stable within it.
    depends_on
        Names of the nodes whose results it takes.
    """

    name: str
    key: str
    kind: Literal["task", "stage"]
    spec: StageSpec | None = None
    depends_on: tuple[str, ...] = ()


class Trace:
    """The nodes of one call of a flow's function.

    Parameters
    ----------
    context
        The run that the nodes will belong to.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.nodes: list[NodeInfo] = []
        self._delayed: dict[str, Delayed] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, calls of tasks and stages add nodes here."""
        import dask

        token = _current.set(self)
        try:
            with dask.annotate(resources=GLUE_RESOURCES):
                yield
        finally:
            _current.reset(token)

    def task(
        self, identity: Identity, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Delayed:
        """A task's node. The same task with the same inputs again is the same node."""
        from dask.base import tokenize

        from laminar.flow.work import run_task

        key = f"{identity.name}-{tokenize(self.context.run_id, identity, args, kwargs)[:8]}"
        if key in self._delayed:
            return self._delayed[key]
        info = NodeInfo(self._unique(identity.name), key, "task")
        work = (info.name, function, identity, self.context)
        return self._add(info, run_task, work, (args, kwargs), TASK_RESOURCES)

    def stage(self, name: str, function: Callable[..., Any], spec: StageSpec, inputs: Mapping[str, Any]) -> Delayed:
        """A stage's node: ``function(spec, context, **inputs)``, the inputs being results by then."""
        from laminar.flow.work import run_stage

        sources = {field: self._sources(value) for field, value in inputs.items() if hasattr(spec, field)}
        spec = _replace(spec, {field: Pending(nodes[0]) for field, nodes in sources.items() if nodes})
        unique = self._unique(name)
        info = NodeInfo(unique, f"{unique}-{self.context.run_id}", "stage", spec)
        work = (info.name, function, spec, self.context)
        return self._add(info, run_stage, work, dict(inputs), STAGE_RESOURCES)

    def output(self, value: Any) -> Delayed:
        """A node that is done when all are, with what the flow's function returned."""
        from laminar.flow.work import first

        info = NodeInfo("result", f"result-{self.context.run_id}", "task")
        return self._call(info, first, (), (value, list(self._delayed.values())), GLUE_RESOURCES)

    def delayed(self) -> list[Delayed]:
        """The nodes' handles, in the order of ``nodes``."""
        return [self._delayed[node.key] for node in self.nodes]

    def needs(self) -> dict[str, Any]:
        """What the stages ask of the cluster; they run one after the other, so the largest of each counts."""
        merged: dict[str, Any] = {}
        for node in self.nodes:
            for name, value in (node.spec.needs() if node.spec else {}).items():
                merged[name] = max(merged[name], value) if name in merged else value
        return merged

    def _add(
        self,
        info: NodeInfo,
        function: Callable[..., Any],
        fixed: tuple[Any, ...],
        inputs: Any,
        resources: dict[str, float],
    ) -> Delayed:
        node = self._call(info, function, fixed, inputs, resources)
        self.nodes.append(dataclasses.replace(info, depends_on=tuple(self._sources(inputs))))
        self._delayed[info.key] = node
        return node

    def _call(
        self,
        info: NodeInfo,
        function: Callable[..., Any],
        fixed: tuple[Any, ...],
        inputs: Any,
        resources: dict[str, float],
    ) -> Delayed:
        """``function(*fixed, inputs, *results)``, the results being those that ``inputs`` has holes for."""
        import dask

        taken: list[Any] = []
        template = take_out(inputs, taken)
        with dask.annotate(resources=resources):
            return dask.delayed(function, pure=False)(*fixed, template, *taken, dask_key_name=info.key)

    def _unique(self, name: str) -> str:
        taken = {node.name for node in self.nodes}
        numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
        return name if name not in taken else next(free for free in numbered if free not in taken)

    def _sources(self, value: Any) -> list[str]:
        """Names of the nodes that a value needs directly, also through attributes and containers."""
        taken: list[Any] = []
        take_out(value, taken)
        names = {node.key: node.name for node in self.nodes}
        found: dict[str, None] = {}
        for delayed in taken:
            _collect([delayed.key], delayed.dask.dependencies, names, found)
        return list(found)


def current() -> Trace | None:
    """The trace of the flow that is being traced, if one is."""
    return _current.get()


def stage(name: str, function: Callable[..., Any], spec: StageSpec, inputs: Mapping[str, Any]) -> Any:
    """Add a stage to the flow that is being traced.

    Parameters
    ----------
    function
        ``async def f(spec, context, **inputs)``, importable on the workers.
    inputs
        May hold results of tasks and stages; where ``spec`` has fields of these names, they hold
        ``Pending`` instead of a result that is not known yet.

    Raises
    ------
    UserError
        No flow is being traced.
    """
    trace = current()
    if trace is None:
        raise UserError(f"{name} is called inside an @lm.flow function; run that flow instead")
    return trace.stage(name, function, spec, inputs)


_current: ContextVar[Trace | None] = ContextVar("laminar_trace", default=None)


def _replace(spec: Any, changes: dict[str, Any]) -> Any:
    """A copy of a pydantic model or a dataclass with other values."""
    if not changes:
        return spec
    if hasattr(spec, "model_copy"):
        return spec.model_copy(update=changes)
    return dataclasses.replace(spec, **changes)


def _collect(
    layers: Sequence[str],
    dependencies: Mapping[str, set[str]],
    names: Mapping[str, str],
    found: dict[str, None],
) -> None:
    """Walk up a Dask graph until nodes of the flow are met."""
    for layer in sorted(layers):
        if layer in names:
            found[names[layer]] = None
        else:
            _collect(sorted(dependencies[layer]), dependencies, names, found)
