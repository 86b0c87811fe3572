"""The end of a run: what its record, its summary and its report say."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laminar.flow.record import ending

if TYPE_CHECKING:
    from laminar.flow.run import Prepared

__all__ = ["end", "end_badly", "report", "summarise"]

Say = Callable[[str], None]
"""Shows the user one line."""


def end(prepared: Prepared, status: str, error: str | None = None) -> float:
    """Write the end into the run's record; seconds since its beginning."""
    seconds = time.monotonic() - prepared.began
    prepared.folder.update_json("run.json", ending(status, seconds, error))
    return seconds


def end_badly(prepared: Prepared, say: Say, status: str, error: str) -> None:
    """As ``end``, where something went wrong already: that is what the user has to hear of."""
    try:
        end(prepared, status, error)
    except Exception as full:  # noqa: BLE001 - the store may be what went wrong
        say(f"{prepared.folder.path('run.json')} does not say how the run ended: {full}")


def summarise(prepared: Prepared, status: str, seconds: float, kept: list[str]) -> dict[str, Any]:
    """What the stages counted, under what the run is; written, too."""
    head = {
        "run_id": prepared.run_id,
        "flow": prepared.plan.flow.name,
        "status": status,
        "seconds": round(seconds, 3),
        "url": prepared.folder.url,
        "kept": kept,
    }
    prepared.folder.update_summary(head)
    return {**head, **(prepared.folder.read_json("summary.json") or {})}


def report(prepared: Prepared, say: Say) -> None:
    """Draw the run's curves, if a stage left any; a run that cannot be drawn is still a run."""
    if not any(node.kind == "stage" for node in prepared.plan.trace.nodes):
        return
    from laminar.watch.report import write_report

    try:
        say(f"report: {write_report(prepared.folder.url)}")
    except Exception as error:  # noqa: BLE001 - whatever a damaged file of the run makes of it
        say(f"no report was written: {type(error).__name__}: {error}")
