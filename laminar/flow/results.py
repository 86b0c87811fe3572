"""A run as its user holds it: during it, when it has ended, and from its files alone."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.flow.store import RunFolder, find_run

if TYPE_CHECKING:
    from laminar.experience.reader import Experience

__all__ = ["Run", "RunResult", "open_run"]


@dataclass(frozen=True)
class Run:
    """What a run's files say of it, at the moment of opening.

    Parameters
    ----------
    status
        ``running``, ``finished``, ``stopped`` (by Ctrl-C; its checkpoint is good), ``failed``, or ``lost``
        (its process is gone and has not said how it ended). Whether one on another machine is gone cannot be seen.
    seconds
        From start to end; None where it has not ended.
    """

    run_id: str
    flow: str
    url: str
    status: str
    parameters: dict[str, Any]
    summary: dict[str, Any]
    seconds: float | None = None
    error: str | None = None

    @property
    def experience(self) -> Experience:
        """The run's trajectories: ``run.experience.query("select …")``, also while it goes on."""
        from laminar.experience.reader import Experience

        return Experience(self.url)

    def _repr_html_(self) -> str:
        rows = {"run": self.run_id, "flow": self.flow, "status": self.status, **self.summary}
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(str(name))}</th><td>{html.escape(_shown(value))}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table>{cells}</table>"


@dataclass(frozen=True)
class RunResult(Run):
    """A run that ended well, with what the flow's function returned (None where it was stopped before that)."""

    result: Any = field(default=None, repr=False)


def open_run(run: str | Path, store: str = "runs") -> Run:
    """Open a run from its files.

    Parameters
    ----------
    run
        Its id or the beginning of it, ``latest``, or its folder's path or URL.

    Raises
    ------
    UserError
        There is no such run.
    """
    folder = RunFolder(find_run(str(run), store))
    record = folder.record()
    return Run(
        run_id=record["run_id"],
        flow=record["flow"],
        url=folder.url,
        status=status_of(record),
        parameters=record["parameters"],
        summary=folder.read_json("summary.json") or {},
        seconds=record.get("seconds"),
        error=record.get("error"),
    )


def status_of(record: dict[str, Any]) -> str:
    """The status in a ``run.json``; one that was ``running`` on this machine is ``lost`` if its process is gone.

    Example
    -------
    >>> status_of({"status": "finished"})
    'finished'
    """
    from laminar.flow.record import is_alive, is_here

    status = str(record["status"])
    return "lost" if status == "running" and is_here(record) and not is_alive(record) else status


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
