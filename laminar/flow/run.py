"""Running a flow: everything is checked, then a cluster is started, then the graph is computed and watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laminar.errors import LaminarError, RunFailed
from laminar.flow.context import RunContext, new_run_id
from laminar.flow.failure import explain
from laminar.flow.finish import end, end_badly, report, summarise
from laminar.flow.interrupts import Interrupts, not_for_children
from laminar.flow.plan import Plan, plan
from laminar.flow.protocols import Cluster, Display, StartCluster
from laminar.flow.record import record_of
from laminar.flow.results import RunResult
from laminar.flow.store import RunFolder
from laminar.watch.events import topic

if TYPE_CHECKING:
    from distributed import Future

    from laminar.flow.flow import Flow

__all__ = ["Prepared", "carry_out", "execute", "prepare"]

STOP_DEADLINE = 300.0
"""Seconds that a run may take to drain and write its checkpoint after the first Ctrl-C."""

RESULT_DEADLINE = 60.0
"""Seconds for what the flow's function returned, or for the error that ended it, to arrive."""

_GLANCE = 0.1
"""Seconds between two looks at Ctrl-C."""


@dataclass(frozen=True)
class Prepared:
    """A run that has its folder and has found nothing wrong, and is not started yet."""

    plan: Plan
    folder: RunFolder
    began: float

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.plan.context.run_id


@dataclass
class _Watch:
    """Hands the run's events to the display, and remembers which tasks' results were kept from earlier runs."""

    display: Display | None
    kept: list[str] = field(default_factory=list)

    def __call__(self, stamped: tuple[float, Mapping[str, Any]]) -> None:
        event = stamped[1]
        if event.get("type") == "stage" and event.get("state") == "kept":
            self.kept.append(str(event["name"]))
        if self.display is not None:
            self.display.event(event)

    def say(self, text: str) -> None:
        if self.display is not None:
            self.display.message(text)


def execute(
    flow: Flow,
    params: Mapping[str, Any],
    *,
    store: str = "runs",
    run_id: str | None = None,
    display: Display | None = None,
    start_cluster: StartCluster | None = None,
) -> RunResult:
    """Run a flow to its end.

    Raises
    ------
    UserError
        What the user gave cannot work; nothing was started.
    LaminarError
        The run failed. Its record says ``failed`` and why.
    KeyboardInterrupt
        A second Ctrl-C.
    """
    prepared = prepare(flow, params, store=store, run_id=run_id)
    return carry_out(prepared, display=display, start_cluster=start_cluster)


def prepare(flow: Flow, params: Mapping[str, Any], *, store: str = "runs", run_id: str | None = None) -> Prepared:
    """Everything before the first process: parameters, graph, the stages' checks, the run's folder.

    Raises
    ------
    UserError
        What the user gave cannot work.
    """
    began = time.monotonic()
    planned = plan(flow, params, store=store, run_id=run_id or new_run_id())
    planned.check()
    return Prepared(planned, RunFolder.create(planned.context, record_of(planned)), began)


def carry_out(
    prepared: Prepared, *, display: Display | None = None, start_cluster: StartCluster | None = None
) -> RunResult:
    """Start the cluster, compute the graph, and record how it ended, whatever happens.

    Raises
    ------
    LaminarError, KeyboardInterrupt
        As ``execute``.
    """
    watch = _Watch(display)
    summary: dict[str, Any] | None = None
    try:
        with Interrupts() as interrupts:
            value, status = _compute(prepared, watch, interrupts, start_cluster or _local_cluster)
            seconds = end(prepared, status)  # Ctrl-C does nothing any more: what has ended well stays so
            summary = summarise(prepared, status, seconds, watch.kept)
            report(prepared, watch.say)
    except KeyboardInterrupt:
        end_badly(prepared, watch.say, "stopped", "stopped at once by a second Ctrl-C")
        raise
    except LaminarError as error:
        end_badly(prepared, watch.say, "failed", str(error))
        raise
    except Exception as error:
        known = explain(error, prepared.folder)
        end_badly(prepared, watch.say, "failed", str(known))
        raise known from error
    finally:
        if display is not None:
            display.stop(summary)
    return RunResult(
        run_id=prepared.run_id,
        flow=prepared.plan.flow.name,
        url=prepared.folder.url,
        status=status,
        parameters=prepared.plan.parameters,
        summary=summary,
        seconds=seconds,
        result=value,
    )


def _local_cluster(needs: dict[str, Any], context: RunContext) -> AbstractContextManager[Cluster]:
    from laminar.cluster import Needs, start

    return start(Needs(**needs), context.run_id)


def _compute(prepared: Prepared, watch: _Watch, interrupts: Interrupts, start_cluster: StartCluster) -> tuple[Any, str]:
    """The flow's result and the run's status, from a cluster that is gone again when this returns."""
    planned = prepared.plan
    with ExitStack() as stack:
        with not_for_children():
            cluster = stack.enter_context(start_cluster(planned.needs(), planned.context))
        try:
            if watch.display is not None:
                names = [node.name for node in planned.trace.nodes]
                watch.display.start(prepared.run_id, cluster.dashboard_link, names)
            for stage, sizes in planned.derived().items():  # so that nobody has to ask what a batch is
                watch.say(f"{stage}: {', '.join(f'{name} {value}' for name, value in sizes.items())}")
            where = {"scheduler": cluster.client.scheduler.address, "dashboard": cluster.dashboard_link}
            prepared.folder.update_json("run.json", where)
            cluster.client.subscribe_topic(topic(prepared.run_id), watch)
            value = None if interrupts.requested else _wait(prepared, cluster, watch, interrupts)
            status = "stopped" if interrupts.requested else "finished"
            cluster.client.unsubscribe_topic(topic(prepared.run_id))
        except KeyboardInterrupt:
            interrupts.deaf = True
            watch.say("stopping now")
            cluster.kill()
            raise
        finally:
            interrupts.deaf = True
    return value, status


def _wait(prepared: Prepared, cluster: Cluster, watch: _Watch, interrupts: Interrupts) -> Any:
    """Compute the graph; look at Ctrl-C while it goes on."""
    planned = prepared.plan
    output, *nodes = cluster.client.compute([planned.output, *planned.trace.delayed()], optimize_graph=False)
    done = threading.Event()
    output.add_done_callback(lambda _: done.set())
    deadline: float | None = None
    while not done.wait(_GLANCE):
        if interrupts.requested and deadline is None:
            watch.say("stopping: what runs is finished and a checkpoint written; Ctrl-C again stops now")
            cluster.request_stop()
            deadline = time.monotonic() + STOP_DEADLINE
        if deadline is not None and time.monotonic() > deadline:
            late = ", ".join(_named(prepared, nodes, "pending"))
            raise RunFailed(f"the run did not stop within {STOP_DEADLINE:.0f} s; still running: {late}")
    return _result(prepared, output, nodes)


def _result(prepared: Prepared, output: Future, nodes: list[Future]) -> Any:
    if output.status == "finished":
        return output.result(timeout=RESULT_DEADLINE)
    failed = next(iter(_named(prepared, nodes, "error")), None)
    if output.status != "error":
        raise RunFailed(f"the scheduler lost the run's tasks ({output.status}); is its process alive?")
    error = output.exception(timeout=RESULT_DEADLINE)
    raise explain(error, prepared.folder, node=failed) from error


def _named(prepared: Prepared, futures: list[Future], status: str) -> list[str]:
    """Names of the nodes whose futures have this status, in the order of the flow."""
    pairs = zip(prepared.plan.trace.nodes, futures, strict=True)
    return [node.name for node, future in pairs if future.status == status]
