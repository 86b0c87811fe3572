"""The life log: what happened to each trajectory after it was appended, on disk before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from laminar.experience.facts import Event, Life
from laminar.experience.schema import LIFE_SCHEMA
from laminar.experience.segments import Segments
from laminar.experience.store import Store

__all__ = ["LifeLog"]


class LifeLog:
    """Events in the order in which they happened; those written together are there together or not at all."""

    def __init__(self, store: Store) -> None:
        self.segments = Segments(store, "life", LIFE_SCHEMA)
        self._seq = 0

    def recover(self, **claim: Any) -> dict[str, Life]:
        """Take the log over from a writer that may have died; the last life of every trajectory in it.

        ``claim`` as in ``Segments.recover``.
        """
        lives: dict[str, Life] = {}
        shared: dict[tuple[Any, ...], Life] = {}
        for _, table in self.segments.recover(LIFE_SCHEMA.names, **claim):
            columns = [table.column(name).to_pylist() for name in LIFE_SCHEMA.names]
            for name, *life, seq in zip(*columns, strict=True):
                self._seq = seq + 1
                lives[name] = shared.setdefault(tuple(life), Life(*life))
        return lives

    def write(self, events: Sequence[Event]) -> None:
        """Put events on disk. LaminarError if the store does not take them; then none of them is there."""
        lines = [
            {"trajectory_id": event.trajectory_id, **asdict(event.life), "seq": self._seq + place}
            for place, event in enumerate(events)
        ]
        self.segments.append(pa.RecordBatch.from_pylist(lines, schema=LIFE_SCHEMA))
        self._seq += len(lines)
