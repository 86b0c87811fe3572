"""``laminar-flow drain RUN W``: take a replica out of a live run; what runs there goes on elsewhere."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laminar.cli.live import Json, Run, Store, ask_scheduler

__all__ = ["drain", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("drain", help="Move everything away from a replica of a live run, then retire it.")(drain)


def drain(
    run: Run,
    worker: Annotated[str, typer.Argument(metavar="W", help="The replica, such as rollout-0.")],
    store: Store = "runs",
    json: Json = False,
) -> dict[str, Any]:
    """Drain a replica; how many trajectories went elsewhere, and seconds until it was retired."""
    answer = ask_scheduler(run, store, "laminar_drain", worker=worker)
    if not json:
        print(f"{worker} is retired: {answer['moved']} trajectories moved, {answer['seconds']:.1f} s")
    return {"status": "ok", "moved": answer["moved"], "seconds": answer["seconds"]}
