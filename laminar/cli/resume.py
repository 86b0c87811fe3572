"""``laminar-flow resume RUN``: go on with a run that was stopped, failed or lost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.cli.run import show_run

__all__ = ["register", "resume"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resume", help="Go on with a run that was stopped, failed or lost, from what its folder holds.")(resume)


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Its id, the beginning of it, `latest`, or its folder.")],
    store: Annotated[str, typer.Option("--store", metavar="URL", help="The run store.")] = "runs",
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Run on the cluster of this Dask scheduler.")
    ] = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="The machine that it ran on is gone: do not wait for word from it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> dict[str, Any]:
    """Resume a run; its summary."""
    from laminar.flow.resume import prepare_resume
    from laminar.flow.run import Prepared

    prepared = prepare_resume(run, store=store, lost=lost)
    if not isinstance(prepared, Prepared):
        if not json:
            print(f"run {prepared['run_id']} is finished: nothing to do")
        return prepared
    return show_run(prepared, json=json, scheduler=scheduler)
