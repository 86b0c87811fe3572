"""``laminar-flow query RUN SQL``: SQL over a run's trajectories, during it and afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.cli.live import Json, Run, Store
from laminar.cli.output import print_table
from laminar.errors import UserError

__all__ = ["query", "register"]

_ROWS = 100
"""Most rows that are printed for people."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("query", help="Query a run's trajectories with SQL (DuckDB): the view is `experience`.")(query)


def query(
    run: Run,
    sql: Annotated[str, typer.Argument(metavar="SQL", help='As "select count(*) from experience where reward = 1".')],
    store: Store = "runs",
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")] = False,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write the answer to a Parquet file.")
    ] = None,
    json: Json = False,
) -> dict[str, Any]:
    """Query a run; its rows."""
    from laminar.experience.reader import Experience
    from laminar.flow.store import find_run

    if csv and json:
        raise UserError("--csv and --json both want to print: give one of them")
    url = find_run(run, store)
    table = Experience(url).query(sql)
    columns = list(table.column_names)
    if parquet is not None:
        _write_parquet(table, parquet)
    if csv:
        _print_csv(table)
    elif parquet is not None and not json:
        print(f"{table.num_rows} rows in {parquet}")
    elif not json:
        rows = table.slice(0, _ROWS).to_pylist()
        print_table(columns, [list(row.values()) for row in rows])
        if table.num_rows > _ROWS:
            print(f"({table.num_rows - _ROWS} more rows; use limit and offset, --csv, --parquet or --json)")
    return {"status": "ok", "url": url, "columns": columns, "rows": table.to_pylist() if json else []}


def _write_parquet(table: Any, file: Path) -> None:
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; give a file that can be written") from error


def _print_csv(table: Any) -> None:
    """Lists and structs as JSON in their cell; an empty cell where there is no value."""
    import csv
    import json

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(table.column_names)
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            cells = [json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in row.values()]
            writer.writerow(["" if cell is None else cell for cell in cells])
    sys.stdout.flush()
