"""Worker half of repack: what a replica says of its load, and its hand-overs in both directions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import Worker

from laminar.repack import Idleness
from laminar.rollout.latency import LatencyMeter
from laminar_dask._compat import run_id_of
from laminar_dask.arrivals import Arrivals
from laminar_dask.attempts import Attempt
from laminar_dask.departures import Departures

if TYPE_CHECKING:
    from laminar_dask.outbox import Outbox
    from laminar_dask.serving import Serving

__all__ = ["Handover"]

FINISHED = 10_000
"""Lengths that are kept until somebody looks."""


class Handover:
    """A replica's part in repack.

    Parameters
    ----------
    attempts
        All trajectory tasks on this replica by key; the replica keeps it.
    begin, end
        As of ``Arrivals``.
    collect
        Brings their ``tokens`` up to now.
    count
        Tokens that a sequence of ids stands for.
    time_scale
        Engine seconds in a real one.
    """

    def __init__(
        self,
        worker: Worker,
        outbox: Outbox,
        attempts: dict[str, Attempt],
        *,
        begin: Callable[[Attempt, dict[str, Any]], bool],
        end: Callable[[Attempt], None],
        collect: Callable[[], None],
        count: Callable[[Any], int],
        time_scale: float,
    ) -> None:
        self.worker = worker
        self.attempts = attempts
        self.collect = collect
        self.count = count
        self.time_scale = time_scale
        self.serving: Serving | None = None
        self.departures = Departures(worker, outbox, attempts, lambda: self.serving)
        self.arrivals = Arrivals(worker, begin=begin, end=end, now=lambda: time.time() * self.time_scale)
        self.prefill_rate = 0.0
        self.meter = LatencyMeter()
        self.idleness = Idleness()
        self.filled = 0
        self.finished: deque[tuple[str, str, int, int]] = deque(maxlen=FINISHED)
        worker.handlers["laminar_repack_look"] = self.look

    def look(self, detail: bool = False) -> dict[str, Any] | None:
        """RPC of the scheduler: gauges, what finished since the last look, and, of an idle replica, its unfinished
        trajectories."""
        if self.serving is None:
            return None
        self.collect()
        gauges = self.serving.engine.gauges()
        waiting = gauges.waiting + self.serving.waiting
        self.idleness = self.idleness.after(
            kv_used=gauges.kv_used, kv_total=gauges.kv_total, waiting=waiting, filled=self.filled
        )
        finished = list(self.finished)
        self.finished.clear()
        generating = {key: a for key, a in self.attempts.items() if a.phase == "generating" and a.departure is None}
        shown = generating if self.idleness.idle or detail else {}
        return {
            "version": self.serving.engine.version,
            "state": self.serving.state,
            "waiting": waiting,
            "kv_total": gauges.kv_total,
            "idle": self.idleness.idle,
            "running": len(generating),
            "kv_used": gauges.kv_used,
            "finished": finished,
            "latency": self.meter.points(),
            "prefill_rate": self.prefill_rate,
            "trajectories": [
                (
                    key,
                    run_id_of(self.worker, key),
                    a.request.group,
                    a.request.group_size,
                    self.count(a.request.prompt_ids),
                    a.tokens,
                    a.moved_at,
                )
                for key, a in shown.items()
            ],
        }

    def arrived(self, key: str) -> None:
        """Its task is here and it generates."""
        self.worker.batched_send({"op": "laminar-resumed", "key": key})
