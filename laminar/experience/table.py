"""The experience table: durable, bounded in memory, with one owner that appends, leases and commits.

Nothing is acknowledged before it is on disk, and memory changes only after the disk did. What dies with the
owner's process are the leases: their rows are ready again. Other processes read the files, see ``reader``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from laminar.errors import LaminarError
from laminar.experience.index import READY, Event, Index, Life, Row
from laminar.experience.life import LifeLog
from laminar.experience.payloads import Payloads
from laminar.experience.samplers import fifo
from laminar.experience.schema import SCHEMA
from laminar.experience.segments import Segments
from laminar.experience.store import Store

__all__ = ["ExperienceTable", "Lease"]

log = logging.getLogger(__name__)

_FACTS = ["trajectory_id", "group_id", "sample", "group_size", "weight_version", "drop_reason"]
"""The columns that the index keeps: the fields of ``Row``, in their order."""


@dataclass(frozen=True)
class Lease:
    """Groups handed out to be trained on. ``table`` has their scored rows, sorted by group and sample."""

    id: str
    table: pa.Table
    groups: list[str]


@dataclass(frozen=True, slots=True)
class _Held:
    lessee: str
    groups: tuple[str, ...]


class ExperienceTable:
    """Rows, groups and their life under ``<url>/experience``. Opening it recovers from the files.

    One process may own it at a time; its methods may be called from any thread.

    Parameters
    ----------
    url
        The run's folder: a path or an fsspec URL.
    memory_bytes
        Most bytes of rows kept in memory. All rows are on disk; older ones are read again when leased.
    compact_after
        Number of write-ahead segments that are compacted into one Parquet part, in the background.

    Raises
    ------
    UserError
        The store cannot be written.
    LaminarError
        A file is damaged. Any method raises it, too, when the store fails; what it was to do is not done.
    """

    def __init__(self, url: str, *, memory_bytes: int = 1 << 30, compact_after: int = 64) -> None:
        store = Store(f"{url.rstrip('/')}/experience")
        store.create(f"{kind}/{part}" for kind in ("rows", "life") for part in ("segments", "parts"))
        self.url = url
        self._rows = Segments(store, "rows", SCHEMA)
        self._log = LifeLog(store)
        self._payloads = Payloads(self._rows, memory_bytes)
        self._index = Index()
        self._leases: dict[str, _Held] = {}
        self._ended: dict[str, str] = {}
        self._lock = threading.Lock()
        self._compact_after = compact_after
        self._compactor = ThreadPoolExecutor(1, thread_name_prefix="laminar-compact")
        self._compacting: dict[str, Future[None]] = {}
        self._recover()
        self._counts = self._index.counts()

    def append(self, batch: pa.RecordBatch) -> list[str]:
        """Add rows. They are on disk when this returns.

        A row whose id is there already is ignored, whatever it holds: the writer may send again what was not
        acknowledged, and a second attempt of a finished trajectory changes nothing.

        Parameters
        ----------
        batch
            Rows of ``SCHEMA``.

        Returns
        -------
        The ids that are new.

        Raises
        ------
        ValueError
            The batch has another schema, or a row contradicts its group. Nothing is added.
        """
        if batch.schema != SCHEMA:
            raise ValueError(f"the batch's columns are {batch.schema.names}, expected those of SCHEMA")
        with self._lock:
            batch, rows = self._new_rows(batch)
            if rows:
                file = self._rows.append(batch)
                self._index.add(rows)
                self._payloads.locate(file, [row.trajectory_id for row in rows])
                self._payloads.keep(file, pa.Table.from_batches([batch]))
                self._compact_if_due(self._rows)
            self._record(self._index.verdicts())
            return [row.trajectory_id for row in rows]

    def lease(self, groups: int, *, version: int, staleness_ceiling: int | None, lessee: str) -> Lease | None:
        """Hand out the ``groups`` ready groups that have been complete for longest.

        Ready groups that are too stale are evicted with the reason ``stale``, also if too few are left.

        Parameters
        ----------
        version
            The weight version that the step will update.
        staleness_ceiling
            Most versions that a row may lie behind it; None for no bound.
        lessee
            Who trains on them; ``release_all`` takes them back by this name.

        Returns
        -------
        None if fewer than ``groups`` groups are ready.
        """
        with self._lock:
            choice = fifo(self._index.ready(), groups=groups, version=version, staleness_ceiling=staleness_ceiling)
            self._record(self._index.change(choice.stale, Life("evicted", reason="stale")))
            if not choice.take:
                return None
            names = sorted(choice.take)
            table = self._payloads.gather(
                [row.trajectory_id for name in names for row in self._index.groups[name].scored]
            )
            self._apply(self._index.change(names, Life("leased")))
            lease = Lease(f"{lessee}-{uuid.uuid4().hex[:12]}", table, names)
            self._leases[lease.id] = _Held(lessee, tuple(names))
            return lease

    def commit(self, lease_id: str, *, step: int, version: int, groups: Sequence[str] = ()) -> None:
        """Note on disk that a lease's rows were trained by ``step``, which updated ``version``. Idempotent.

        Parameters
        ----------
        groups
            The lease's groups. With them the commit also counts if the owner was restarted since it gave the
            lease, and so does not know it.

        Raises
        ------
        LaminarError
            The lease was released, or is unknown and its groups are no longer free to be committed.
        """
        trained = Life("trained", step, version)
        with self._lock:
            held = self._leases.get(lease_id)
            if held is not None:
                self._record(self._index.change(held.groups, trained))
                self._end(lease_id, "committed")
            elif self._ended.get(lease_id) != "committed":
                self._commit_unknown(lease_id, trained, groups)

    def release(self, lease_id: str) -> None:
        """Give a lease's rows back, untrained. A lease that has ended is no error."""
        with self._lock:
            self._release([lease_id] if lease_id in self._leases else [])

    def release_all(self, lessee: str) -> int:
        """Give back all that somebody holds, because it died; the number of leases it held."""
        with self._lock:
            mine = [name for name, held in self._leases.items() if held.lessee == lessee]
            self._release(mine)
            return len(mine)

    def rewind(self, step: int) -> int:
        """Make ready again what was trained after ``step``, the last one of the checkpoint resumed from.

        Returns
        -------
        The number of rows.
        """
        with self._lock:
            events = self._index.rewind(step=step)
            self._record(events)
            return len(events)

    def ready_groups(self) -> int:
        """How many groups could be leased now, staleness aside."""
        return self._counts["groups_ready"]

    def trained_rows(self) -> int:
        """How many rows are trained."""
        return self._counts["trained"]

    def counts(self) -> dict[str, int]:
        """``rows``; by state ``ready``, ``leased``, ``trained``, ``evicted``; ``groups``, ``groups_ready``,
        ``groups_open``; of the evicted, ``evicted_<reason>`` and ``dropped_<reason>``. Never waits."""
        return dict(self._counts)

    def memory_used(self) -> int:
        """Bytes of rows in memory; at most ``memory_bytes``."""
        return self._payloads.nbytes

    def waiting_for(self, groups: int) -> str:
        """One line that names, with counts, what keeps ``groups`` groups from being leased."""
        with self._lock:
            return self._index.waiting_for(groups)

    def trajectory_ids(self) -> set[str]:
        """Trajectories that arrived, in whatever state they are now."""
        with self._lock:
            return set(self._index.rows)

    def groups_seen(self) -> set[str]:
        """Groups of which at least one row arrived."""
        with self._lock:
            return set(self._index.groups)

    def close(self) -> None:
        """Let a compaction end. Nothing else is pending: every method leaves its work on disk."""
        self._compactor.shutdown(wait=True)

    def _new_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Row]]:
        rows = _facts(batch)
        fresh: dict[str, int] = {}
        for place, row in enumerate(rows):
            if row.trajectory_id not in self._index.rows:
                fresh.setdefault(row.trajectory_id, place)
        mine = [rows[place] for place in fresh.values()]
        self._index.check(mine)
        if len(mine) < len(rows):
            batch = batch.take(pa.array(list(fresh.values()), pa.int64()))
        return batch, mine

    def _record(self, events: Sequence[Event]) -> None:
        """Write events to the life log, then let them happen."""
        if events:
            self._index.allow(events)
            self._log.write(events)
            self._compact_if_due(self._log.segments)
        self._apply(events)

    def _apply(self, events: Sequence[Event]) -> None:
        self._index.apply(events)
        self._counts = self._index.counts()

    def _end(self, lease_id: str, how: str) -> None:
        del self._leases[lease_id]
        self._ended[lease_id] = how

    def _release(self, lease_ids: Iterable[str]) -> None:
        for name in lease_ids:
            self._apply(self._index.change(self._leases[name].groups, READY))
            self._end(name, "released")

    def _commit_unknown(self, lease_id: str, trained: Life, groups: Sequence[str]) -> None:
        rows = [row for name in groups if name in self._index.groups for row in self._index.groups[name].scored]
        lives = {self._index.life(row.trajectory_id) for row in rows}
        how = self._ended.get(lease_id, "unknown")
        if lives == {trained}:
            return
        if how == "released" or lives != {READY}:
            raise LaminarError(f"lease {lease_id} is {how}: its rows cannot be committed for step {trained.step}")
        self._record(self._index.change(groups, trained))
        self._ended[lease_id] = "committed"

    def _recover(self) -> None:
        for file, table in self._rows.recover(_FACTS):
            rows = _facts(table)
            self._index.add(rows)
            self._payloads.locate(file, [row.trajectory_id for row in rows])
        lives = self._log.recover()
        if strangers := lives.keys() - self._index.rows.keys():
            log.warning("%s: the life log names %d rows that are not there", self.url, len(strangers))
        known = [(name, life) for name, life in lives.items() if name not in strangers and life != READY]
        self._index.apply([Event(name, life) for name, life in known])
        self._record(self._index.verdicts())

    def _compact_if_due(self, segments: Segments) -> None:
        running = self._compacting.get(segments.folder)
        if segments.loose % self._compact_after == 0 and (running is None or running.done()):
            self._compacting[segments.folder] = self._compactor.submit(self._compact, segments, segments.loose)

    def _compact(self, segments: Segments, count: int) -> None:
        try:
            part, table = segments.compact(count)
            if segments is self._rows:
                with self._lock:
                    self._payloads.compacted(part, table["trajectory_id"].to_pylist())
            segments.forget(count)
        except Exception as error:  # noqa: BLE001  (a thread's boundary: the segments still hold every row)
            log.warning("%s: compaction failed and will be tried again: %s", self.url, error)


def _facts(table: Any) -> list[Row]:
    columns = [table.column(name).to_pylist() for name in _FACTS]
    return [Row(*values) for values in zip(*columns, strict=True)]
