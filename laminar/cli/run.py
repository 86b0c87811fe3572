"""``laminar-flow run FILE``: run a flow on a cluster of its own on this machine, or on one that is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laminar.cli.options import FLOW_COMMAND, chosen, given
from laminar.cli.output import Failure, print_values
from laminar.errors import LaminarError

if TYPE_CHECKING:
    from laminar.flow.run import Prepared

__all__ = ["register", "run", "show_run"]

_ABOUT = "Run a flow: check it, start its processes, show its progress, end with a summary."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run", help=_ABOUT, **FLOW_COMMAND)(run)


def run(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="FILE[:FLOW]")] = None,
    params: Annotated[Path | None, typer.Option("--params", metavar="FILE")] = None,
    store: Annotated[str, typer.Option("--store", metavar="URL")] = "runs",
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID")] = None,
    scheduler: Annotated[str | None, typer.Option("--scheduler", metavar="ADDRESS")] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> dict[str, Any]:
    """Run a flow; its summary."""
    from laminar.flow.run import prepare

    flow = chosen("run", _ABOUT, context, file)
    if flow is None:
        return {}
    values = given(flow, "run", context.args, params)
    return show_run(prepare(flow, values, store=store, run_id=run_id), json=json, scheduler=scheduler)


def show_run(prepared: Prepared, *, json: bool, scheduler: str | None = None) -> dict[str, Any]:
    """Carry a prepared run out before the user's eyes; what ``--json`` prints.

    ``scheduler`` is that of a cluster which somebody else has started; None: one of its own.
    """
    from laminar.attached import attached_to
    from laminar.flow.plain import as_plain
    from laminar.flow.run import carry_out
    from laminar.watch.progress import Progress

    display = Progress(file=sys.stderr if json else None)
    try:
        start = None if scheduler is None else attached_to(scheduler)
        result = carry_out(prepared, display=display, start_cluster=start)
    except LaminarError as error:
        raise Failure.of(error, run_id=prepared.run_id, url=prepared.folder.url) from error
    except KeyboardInterrupt as error:
        answer = {"status": "stopped", "run_id": prepared.run_id, "url": prepared.folder.url}
        raise Failure("stopped at once by a second Ctrl-C", 130, answer) from error
    returned = as_plain(result.result)
    if not json and returned is not None:
        print_values(returned if isinstance(returned, dict) else {"": returned}, title="result")
    return {**result.summary, "result": returned}
