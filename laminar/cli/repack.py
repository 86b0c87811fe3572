"""``laminar-flow repack RUN --from W [--to W]``: move what runs on one replica to others, by hand."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.cli.live import Json, Run, Store, ask_scheduler

__all__ = ["register", "repack"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("repack", help="Move the trajectories that run on one replica of a live run to others.")(repack)


def repack(
    run: Run,
    source: Annotated[str, typer.Option("--from", metavar="W", help="The replica to empty, such as rollout-0.")],
    target: Annotated[str | None, typer.Option("--to", metavar="W", help="Where to; none: the least loaded.")] = None,
    store: Store = "runs",
    json: Json = False,
) -> dict[str, Any]:
    """Empty a replica; how many trajectories were asked to move."""
    answer = ask_scheduler(run, store, "laminar_repack_move", source=source, target=target)
    if not json:
        print(f"{answer['moved']} trajectories move from {source} to {target or 'other replicas'}")
    return {"status": "ok", "moved": answer["moved"]}
