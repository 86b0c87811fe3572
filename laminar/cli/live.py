"""What commands about a run have in common: how it is named, and how its scheduler is asked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.errors import UserError

__all__ = ["Json", "Run", "Store", "ask_scheduler"]

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id or the beginning of it, its folder, or `latest`.")]
Store = Annotated[str, typer.Option("--store", metavar="URL", help="Run store.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

DEADLINE = 360.0
"""Seconds for the scheduler to answer; longer than a drain may take."""


def ask_scheduler(run: str, store: str, call: str, **arguments: Any) -> dict[str, Any]:
    """Call a handler on the scheduler of a live run.

    Raises
    ------
    UserError
        The run is over or cannot be reached, or the scheduler refuses; one line says why.
    """
    from distributed import Client

    from laminar.errors import LaminarError
    from laminar.flow.store import RunFolder, find_run

    url = find_run(run, store)
    record = RunFolder(url).read_json("run.json") or {}
    address = record.get("scheduler")
    if (status := record.get("status", "running")) != "running":
        raise UserError(f"run {run} is over ({status}): there is nothing left to move ({url})")
    if not address:
        raise UserError(f"run {run} has no scheduler: it is over, or runs elsewhere ({url})")
    try:
        with Client(address, timeout=10, set_as_default=False) as client:
            answer: Any = client.sync(getattr(client.scheduler, call), **arguments, callback_timeout=DEADLINE)
    except LaminarError as error:
        raise UserError(str(error)) from None
    except (OSError, TimeoutError) as error:
        raise UserError(f"the scheduler of run {run} does not answer at {address}: {error}; is the run over?") from None
    return dict(answer)
