"""``laminar-flow query RUN SQL``: SQL over a run's trajectories, during it and afterwards."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.cli.output import print_table

__all__ = ["query", "register"]

_ROWS = 100
"""Most rows that are printed for people."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("query", help="Query a run's trajectories with SQL (DuckDB): the view is `experience`.")(query)


def query(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id or the beginning of it, its folder, or `latest`.")
    ],
    sql: Annotated[str, typer.Argument(metavar="SQL", help='As "select count(*) from experience where reward = 1".')],
    store: Annotated[str, typer.Option("--store", metavar="URL", help="Run store.")] = "runs",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> dict[str, Any]:
    """Query a run; its rows."""
    from laminar.experience.reader import Experience
    from laminar.flow.store import find_run

    url = find_run(run, store)
    table = Experience(url).query(sql)
    columns = list(table.column_names)
    if not json:
        rows = table.slice(0, _ROWS).to_pylist()
        print_table(columns, [list(row.values()) for row in rows])
        if table.num_rows > _ROWS:
            print(f"({table.num_rows - _ROWS} more rows; use limit and offset, or --json)")
    return {"status": "ok", "url": url, "columns": columns, "rows": table.to_pylist() if json else []}
