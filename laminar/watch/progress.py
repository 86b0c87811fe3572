"""Live progress of a run: a panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from laminar.watch.outlet import Outlet
from laminar.watch.panel import evaluation_line, live_panel, step_line, summary_table
from laminar.watch.view import RunView, one_line

__all__ = ["Progress"]

_PLAIN_WIDTH = 100
_LOG_LINES = 20
"""Lines of step progress that a whole run prints where there is no terminal, about."""


class Progress:
    """Shows a run to whoever started it. Thread-safe: events come on Dask's thread.

    ``start``, then ``event`` and ``message`` as they come, then ``stop``; as a context manager it gives the
    terminal back whatever happens. Every call before ``start`` or after ``stop`` prints a plain line.

    Parameters
    ----------
    file
        Where to show it; stdout if None. A command that prints JSON on stdout passes ``sys.stderr``.
    every
        Without a terminal, print every so many steps; None: about twenty lines over the run.
    refresh_per_second
        How often a terminal's panel is drawn.
    """

    def __init__(
        self, *, file: TextIO | None = None, every: int | None = None, refresh_per_second: float = 2.0
    ) -> None:
        self.view = RunView()
        self._live_wanted = _is_live(file or sys.stdout)
        self._console = _console(file or sys.stdout, live=self._live_wanted)
        self._every = every
        self._refresh_per_second = refresh_per_second
        self._lock = threading.Lock()  # guards the view; never held while printing, which takes rich's lock
        self._live: Live | None = None
        self._run_id = ""
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, run_id: str, dashboard: str | None, stages: Sequence[str] = ()) -> None:
        """Print the run id and the dashboard's link, first of all, and begin to show progress."""
        self._run_id = run_id
        self._began = time.monotonic()
        with self._lock:
            self.view.stages.update(dict.fromkeys(stages, "to do"))
        self._print(Text(f"run {run_id}   dashboard {dashboard or 'off'}"))
        if self._live_wanted:
            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=self._refresh_per_second,
                transient=True,
            )
            self._live.start()

    def event(self, event: Mapping[str, Any]) -> None:
        """Take one event of the run's topic; types that are not known are left aside."""
        if event.get("type") == "message":
            self.message(str(event.get("text", "")), level=str(event.get("level", "info")))
            return
        with self._lock:
            line = self._line(event) if self.view.observe(event) else None
        if line is not None and self._live is None:
            self._print(Text(line))

    def message(self, text: str, *, level: str = "info") -> None:
        """Print one line, above the panel where there is one."""
        style = {"warning": "yellow", "error": "bold red"}.get(level, "")
        prefix = f"{level}: " if style else ""
        self._print(Text(one_line(prefix + text), style=style))

    def stop(self, summary: Mapping[str, Any] | None = None) -> None:
        """Take the panel away and print the closing table, or the last panel where there is no summary."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if summary is not None:
            self._print(summary_table(summary))
        elif live is not None:
            self._print(self._panel())

    def _panel(self) -> RenderableType:
        with self._lock:
            return live_panel(self.view, run_id=self._run_id, elapsed=time.monotonic() - self._began)

    def _line(self, event: Mapping[str, Any]) -> str | None:
        """The plain line of an event, if it is worth one: replicas and table depth change all the time."""
        match event["type"]:
            case "step" if self._is_due():
                return step_line(self.view)
            case "evaluation":
                return evaluation_line(event)
            case "stage":
                return one_line(f"stage {event.get('name')}: {event.get('state')}")
        return None

    def _is_due(self) -> bool:
        every = self._every or max(1, self.view.steps // _LOG_LINES)
        return self.view.step % every == 0 or self.view.step in (1, self.view.steps)

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=isinstance(what, Text))


def _is_live(file: TextIO) -> bool:
    """A terminal that can show the panel. The file itself is asked: FORCE_COLOR does not make a pipe one."""
    encoding = (getattr(file, "encoding", None) or "").lower()
    return file.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")


def _console(file: TextIO, *, live: bool) -> Console:
    outlet: Any = Outlet(file)
    if live:
        return Console(file=outlet, highlight=False)
    return Console(
        file=outlet, force_terminal=False, color_system=None, width=_PLAIN_WIDTH, highlight=False, safe_box=True
    )
