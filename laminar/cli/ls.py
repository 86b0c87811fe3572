"""``laminar-flow ls``: the runs of a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.cli.output import print_table

__all__ = ["ls", "register"]

_COLUMNS = ("run_id", "flow", "status", "started", "seconds")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ls", help="List the runs of a store, the newest last.")(ls)


def ls(
    store: Annotated[str, typer.Option("--store", metavar="URL", help="Run store.")] = "runs",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> dict[str, Any]:
    """List the runs of a store; their records."""
    from laminar.flow.results import status_of
    from laminar.flow.store import absolute, list_runs

    runs = [{**record, "status": status_of(record)} for record in list_runs(store)]
    if not json:
        if runs:
            print_table(_COLUMNS, [[_cell(run, name) for name in _COLUMNS] for run in runs])
        else:
            print(f"no runs in {absolute(store)}")
    return {"status": "ok", "runs": runs}


def _cell(record: dict[str, Any], name: str) -> Any:
    value = record.get(name)
    return str(value)[:19].replace("T", " ") if name == "started" else value
