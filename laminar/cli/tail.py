"""``laminar-flow tail RUN``: a run's new trajectories as they arrive, with their text and reward."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from laminar.cli.live import Run, Store
from laminar.errors import UserError

__all__ = ["register", "tail"]

_GLANCE = 1.0
"""Seconds between two looks at the files."""
_LATE = 60.0
"""Seconds that a trajectory may need from being scored to being in the table, clocks of hosts apart included."""
_COLUMNS = """trajectory_id, reward, weight_version, finish_reason, finished_at, prompt_text, response_text,
evicted_reason, message"""
_NEWEST = f"select {_COLUMNS} from experience order by finished_at desc, trajectory_id desc limit {{count}}"
_SINCE = f"select {_COLUMNS} from experience where finished_at >= {{since}} order by finished_at, trajectory_id"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tail", help="Follow a run's new trajectories, with their text and reward, until it ends.")(tail)


def tail(
    run: Run = "latest",
    store: Store = "runs",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Trajectories to begin with.")] = 5,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on while the run does.")] = True,
    width: Annotated[int, typer.Option("--width", min=20, help="Most characters of each text.")] = 200,
) -> dict[str, Any]:
    """Print trajectories; how many."""
    from laminar.experience.reader import Experience
    from laminar.flow.results import open_run

    experience = Experience(open_run(run, store).url)
    newest = _asked(experience, _NEWEST.format(count=lines))[::-1]
    known = {row["trajectory_id"] for row in _asked(experience, "select trajectory_id from experience")}
    since, printed = max((row["finished_at"] for row in newest), default=0.0), 0
    while True:
        for row in newest:
            print(line_of(row, width=width), flush=True)
        printed += len(newest)
        if not follow:
            return {"status": "ok", "trajectories": printed}
        running = open_run(run, store).status == "running"  # asked first: what came before the end is printed
        found = _asked(experience, _SINCE.format(since=repr(since - _LATE)))
        newest = [row for row in found if row["trajectory_id"] not in known]
        known |= {row["trajectory_id"] for row in newest}
        since = max([since, *(row["finished_at"] for row in newest)])
        follow = running
        if running:
            time.sleep(_GLANCE)


def line_of(row: dict[str, Any], *, width: int) -> str:
    """A trajectory for people.

    >>> row = {"trajectory_id": "g000001-0", "reward": 1.0, "weight_version": 3, "finish_reason": "stop",
    ...        "prompt_text": "1 + 1 =", "response_text": " 2\\n", "evicted_reason": None, "message": ""}
    >>> print(line_of(row, width=20))
    g000001-0  reward 1  version 3  stop
      1 + 1 =
      > 2
    >>> print(line_of(row | {"reward": None, "evicted_reason": "reward_error", "message": "no number"}, width=4))
    g000001-0  reward_error: no number  version 3  stop
      1 +…
      > 2
    """
    reward = f"reward {row['reward']:.4g}" if row["reward"] is not None else _why(row)
    head = f"{row['trajectory_id']}  {reward}  version {row['weight_version']}  {row['finish_reason']}"
    return f"{head}\n  {_short(row['prompt_text'], width)}\n  > {_short(row['response_text'], width)}"


def _why(row: dict[str, Any]) -> str:
    reason = str(row["evicted_reason"])
    return f"{reason}: {row['message']}" if row["message"] else reason


def _short(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _asked(experience: Any, sql: str) -> list[dict[str, Any]]:
    """Rows; none where the run has not opened its table yet."""
    try:
        return list(experience.query(sql).to_pylist())
    except UserError as error:
        if "there is no experience" in str(error):
            return []
        raise
