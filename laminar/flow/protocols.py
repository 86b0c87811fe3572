"""What running a flow asks of others: a display that shows it, a cluster that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from laminar.flow.context import RunContext

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Cluster", "Display", "StartCluster"]


class Display(Protocol):
    """Where a run is shown. Called from several threads."""

    def start(self, run_id: str, dashboard: str | None, stages: Sequence[str]) -> None:
        """The cluster is up."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of the run's topic (``laminar.watch.events``)."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def stop(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over; ``summary`` is None if it failed."""


class Cluster(Protocol):
    """A started cluster (``laminar.cluster.RunningCluster``)."""

    @property
    def client(self) -> Client:
        """What talks to its scheduler."""

    @property
    def dashboard_link(self) -> str | None:
        """Where the dashboard listens."""

    def request_stop(self) -> None:
        """Ask the stages to stop soon and in order; returns at once."""

    def kill(self) -> None:
        """End every process now."""


StartCluster = Callable[[dict[str, Any], RunContext], AbstractContextManager[Cluster]]
"""Takes ``Needs`` as a dict; leaving the context ends every process."""
