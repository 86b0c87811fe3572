"""``laminar-flow repack RUN --from W [--to W]``: move what runs on one replica to others, by hand."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.errors import UserError

__all__ = ["ask_scheduler", "register", "repack"]

DEADLINE = 360.0
"""Seconds for the scheduler to answer; longer than a drain may take."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("repack", help="Move the trajectories that run on one replica of a live run to others.")(repack)


def repack(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id or the beginning of it, its folder, or `latest`.")
    ],
    source: Annotated[str, typer.Option("--from", metavar="W", help="The replica to empty, such as rollout-0.")],
    target: Annotated[str | None, typer.Option("--to", metavar="W", help="Where to; none: the least loaded.")] = None,
    store: Annotated[str, typer.Option("--store", metavar="URL", help="Run store.")] = "runs",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> dict[str, Any]:
    """Empty a replica; how many trajectories were asked to move."""
    answer = ask_scheduler(run, store, "laminar_repack_move", source=source, target=target)
    if not json:
        print(f"{answer['moved']} trajectories move from {source} to {target or 'other replicas'}")
    return {"status": "ok", "moved": answer["moved"]}


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
