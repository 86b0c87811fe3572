"""Worker half of repack: what a replica says of its load, and its hand-overs in both directions."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from distributed import Worker

from laminar.repack import Idleness
from laminar_dask._compat import run_id_of
from laminar_dask.arrivals import Arrivals
from laminar_dask.attempts import Attempt
from laminar_dask.departures import Departures

if TYPE_CHECKING:
    from laminar_dask.in_engine import InEngine
    from laminar_dask.outbox import Outbox

__all__ = ["Handover"]

FINISHED = 10_000
"""Lengths that are kept until somebody looks."""


class Handover:
    """A replica's part in repack.

    Parameters
    ----------
    attempts
        All trajectory tasks on this replica by key; the replica keeps it.
    inside
        What generates.
    """

    def __init__(self, worker: Worker, outbox: Outbox, attempts: dict[str, Attempt], inside: InEngine) -> None:
        self.worker = worker
        self.attempts = attempts
        self.inside = inside
        self.departures = Departures(worker, outbox, attempts, lambda: inside.serving)
        self.arrivals = Arrivals(
            worker,
            begin=inside.begin_at_once,
            end=inside.end_unclaimed,
            now=lambda: time.time() * inside.time_scale,
        )
        self.prefill_rate = 0.0
        self.idleness = Idleness()
        self.filled = 0
        self.finished: deque[tuple[str, str, int, int]] = deque(maxlen=FINISHED)
        worker.handlers["laminar_repack_look"] = self.look

    def look(self, detail: bool = False) -> dict[str, Any] | None:
        """RPC of the scheduler: gauges, what finished since the last look, and, of an idle replica, its unfinished
        trajectories."""
        serving = self.inside.serving
        if serving is None:
            return None
        self.inside.collect()
        gauges = serving.engine.gauges()
        waiting = gauges.waiting + serving.waiting
        self.idleness = self.idleness.after(
            kv_used=gauges.kv_used, kv_total=gauges.kv_total, waiting=waiting, filled=self.filled
        )
        finished = list(self.finished)
        self.finished.clear()
        generating = {key: a for key, a in self.attempts.items() if a.phase == "generating" and a.departure is None}
        shown = generating if self.idleness.idle or detail else {}
        return {
            "version": serving.engine.version,
            "state": serving.state,
            "waiting": waiting,
            "kv_total": gauges.kv_total,
            "idle": self.idleness.idle,
            "running": len(generating),
            "kv_used": gauges.kv_used,
            "finished": finished,
            "latency": self.inside.meter.points(),
            "prefill_rate": self.prefill_rate,
            "trajectories": [
                (
                    key,
                    run_id_of(self.worker, key),
                    a.request.group,
                    a.request.group_size,
                    self.inside.count(a.request.prompt_ids),
                    a.tokens,
                    a.moved_at,
                )
                for key, a in shown.items()
            ],
        }

    def arrived(self, key: str) -> None:
        """Its task is here and it generates."""
        self.worker.batched_send({"op": "laminar-resumed", "key": key})
