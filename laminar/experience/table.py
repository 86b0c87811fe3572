"""The experience table: durable, bounded in memory, with one owner that appends, leases and commits.

Nothing is acknowledged before it is on disk, and memory changes only after the disk did. What dies with the
owner's process are the leases: their rows are ready again. Other processes read the files, see ``reader``.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from laminar.errors import LaminarError
from laminar.experience.compaction import Compactor
from laminar.experience.epochs import Epoch
from laminar.experience.evictors import staleness_ceiling as at_most
from laminar.experience.facts import FACTS, READY, Event, Life, Row
from laminar.experience.index import Index
from laminar.experience.leases import Leases
from laminar.experience.life import LifeLog
from laminar.experience.payloads import Payloads
from laminar.experience.samplers import Rules, choose
from laminar.experience.schema import SCHEMA
from laminar.experience.segment_files import SegmentFile
from laminar.experience.segments import Segments
from laminar.experience.store import Store, StoreError

__all__ = ["ExperienceTable", "Lease"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """Groups handed out to be trained on. ``table`` has their scored rows, sorted by group and sample."""

    id: str
    table: pa.Table
    groups: list[str]


class ExperienceTable:
    """Rows, groups and their life under ``<url>/experience``. Opening it recovers from the files.

    One process owns it at a time: opening it takes it from whoever had it. Methods may be called from any thread.

    Parameters
    ----------
    url
        The run's folder: a path or an fsspec URL.
    rules
        How groups are chosen to be trained on, and which are evicted instead.
    memory_bytes
        Most bytes of rows kept in memory. All rows are on disk; older ones are read again when leased.
    compact_after
        Number of write-ahead segments that are compacted into one Parquet part, in the background.
    compact_in
        Where compaction runs; a thread of its own if None.
    clock, now
        For leases (seconds, monotonic), and for the age of groups (unix time in seconds).

    Attributes
    ----------
    notes
        What was found wrong at opening and repaired, one line each.

    Raises
    ------
    UserError
        The store cannot be written.
    LaminarError
        A file is damaged. Any method raises it, too, when the store fails (``StoreError``) or a later owner has the
        table; what it was to do is not done.
    """

    def __init__(
        self,
        url: str,
        *,
        rules: Rules | None = None,
        memory_bytes: int = 1 << 30,
        compact_after: int = 64,
        compact_in: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        store = Store(f"{url.rstrip('/')}/experience")
        store.create(["epochs", *(f"{kind}/{part}" for kind in ("rows", "life") for part in ("segments", "parts"))])
        self.url = url
        self._rules = rules or Rules()
        self._now = now
        self._epoch = Epoch(store)
        self._rows = Segments(store, "rows", SCHEMA)
        self._log = LifeLog(store)
        self._payloads = Payloads(self._rows, memory_bytes)
        self._index = Index()
        self._leases = Leases(clock)
        self._lock = threading.RLock()
        self._compactor = Compactor(compact_after, self._moved, compact_in)
        self._recover()
        self.notes = [*self._rows.notes, *self._log.segments.notes]
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
                groups = self._index.check(rows)
                file = self._rows.append(batch)
                self._index.add(rows, groups)
                self._payloads.locate(file, [row.trajectory_id for row in rows])
                self._payloads.keep(file, pa.Table.from_batches([batch]))
                self._compactor.look(self._rows)
            self._record(self._index.verdicts())
            return [row.trajectory_id for row in rows]

    def lease(
        self,
        groups: int,
        *,
        version: int,
        staleness_ceiling: int | None,
        lessee: str,
        seconds: float | None = None,
    ) -> Lease | None:
        """Hand out ``groups`` ready groups, chosen by the table's rules.

        Groups that the rules give up are evicted with their reason, also if too few are left. A group beyond the
        ceiling goes first, as ``stale``.

        Parameters
        ----------
        version
            The weight version that the step will update.
        staleness_ceiling
            Most versions that a row may lie behind it; None for no bound.
        lessee
            Who trains on them; ``release_all`` takes them back by this name.
        seconds
            After which the groups are ready again if the lease was neither committed nor released; None: never.

        Returns
        -------
        None if fewer than ``groups`` groups are ready.
        """
        rules = self._rules
        if staleness_ceiling is not None:
            rules = replace(rules, evictors=(at_most(staleness_ceiling), *rules.evictors))
        with self._lock:
            self._epoch.check()
            self._expire()
            choice = choose(self._index.ready(), groups=groups, version=version, now=self._now(), rules=rules)
            self._evict(choice.evict)
            if not choice.take:
                return None
            names = sorted(choice.take)
            table = self._payloads.gather(
                [row.trajectory_id for name in names for row in self._index.groups[name].scored]
            )
            self._index.lease(names)
            self._counts = self._index.counts()
            return Lease(self._leases.hold(lessee, names, seconds=seconds), table, names)

    def commit(self, lease_id: str, *, step: int, version: int, groups: Sequence[str] = ()) -> None:
        """Note on disk that a lease's rows were trained by ``step``, which updated ``version``. Idempotent.

        Parameters
        ----------
        groups
            The lease's groups. With them the commit also counts if the lease has expired, or the owner was
            restarted since it gave the lease and does not know it, as long as nobody else has the groups.

        Raises
        ------
        LaminarError
            The lease was released, or has expired or is unknown and its groups are no longer free to be committed.
        """
        trained = Life("trained", step, version)
        with self._lock:
            self._expire()
            held = self._leases.get(lease_id)
            if held is not None:
                self._record(self._index.change(held.groups, trained))
                self._leases.end(lease_id, "committed")
            elif self._leases.how(lease_id) != "committed":
                self._commit_ended(lease_id, trained, groups)

    def release(self, lease_id: str) -> None:
        """Give a lease's rows back, untrained. A lease that has ended is no error."""
        with self._lock:
            self._give_back([lease_id] if self._leases.get(lease_id) else [], "released")

    def release_all(self, lessee: str) -> int:
        """Give back all that somebody holds, because it died; the number of leases it held."""
        with self._lock:
            mine = self._leases.of(lessee)
            self._give_back(mine, "released")
            return len(mine)

    def evict(self, groups: Iterable[str], reason: str) -> int:
        """Give groups up, because they cannot be completed or shall not be trained on; the number of rows.

        Rows that arrive for such a group later are evicted with the same reason. What is leased stays leased, and
        a group of which nothing has arrived yet is no error.
        """
        with self._lock:
            return self._evict(dict.fromkeys(groups, reason))

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

    def groups_settled(self) -> set[str]:
        """Groups that nothing more will be done with: evicted, or complete with every row trained or dropped."""
        with self._lock:
            return self._index.settled()

    def close(self) -> None:
        """Let a compaction end, and delete what no longer counts. Every method has left its work on disk."""
        self._compactor.close()
        for segments in (self._rows, self._log.segments):
            with suppress(StoreError):  # the next owner deletes it
                segments.close()

    def _new_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Row]]:
        rows = _facts(batch)
        fresh: dict[str, int] = {}
        for place, row in enumerate(rows):
            if row.trajectory_id not in self._index.rows:
                fresh.setdefault(row.trajectory_id, place)
        if len(fresh) < len(rows):
            rows = [rows[place] for place in fresh.values()]
            batch = batch.take(pa.array(list(fresh.values()), pa.int64()))
        return batch, rows

    def _record(self, events: Sequence[Event]) -> None:
        """Write events to the life log, then let them happen."""
        if events:
            self._index.allow(events)
            self._log.write(events)
            self._compactor.look(self._log.segments)
        self._apply(events)

    def _apply(self, events: Sequence[Event]) -> None:
        self._index.apply(events)
        self._counts = self._index.counts()

    def _evict(self, reasons: Mapping[str, str]) -> int:
        events = [event for name, reason in reasons.items() for event in self._index.evict([name], reason)]
        self._record(events)
        return len(events)

    def _expire(self) -> None:
        self._give_back(self._leases.overdue(), "expired")

    def _give_back(self, lease_ids: Iterable[str], how: str) -> None:
        for name in lease_ids:
            held = self._leases.end(name, how)
            self._index.give_back(held.groups)
        self._counts = self._index.counts()

    def _commit_ended(self, lease_id: str, trained: Life, groups: Sequence[str]) -> None:
        rows = [row for name in groups if name in self._index.groups for row in self._index.groups[name].scored]
        lives = {self._index.life(row.trajectory_id) for row in rows}
        how = self._leases.how(lease_id)
        if lives == {trained}:
            return
        if how == "released" or lives != {READY}:
            raise LaminarError(f"lease {lease_id} is {how}: its rows cannot be committed for step {trained.step}")
        self._record(self._index.change(groups, trained))
        self._leases.note(lease_id, "committed")

    def _recover(self) -> None:
        claim: dict[str, Any] = {"epoch": self._epoch.name, "check": self._epoch.check}
        for file, table in self._rows.recover(FACTS, **claim):
            rows = _facts(table)
            self._index.add(rows)
            self._payloads.locate(file, [row.trajectory_id for row in rows])
        lives = self._log.recover(**claim)
        if strangers := lives.keys() - self._index.rows.keys():
            log.warning("%s: the life log names %d rows that are not there", self.url, len(strangers))
        known = [(name, life) for name, life in lives.items() if name not in strangers and life != READY]
        self._index.apply([Event(name, life) for name, life in known])
        self._record(self._index.verdicts())

    def _moved(self, segments: Segments, part: SegmentFile) -> None:
        if segments is self._rows:
            with self._lock:
                self._payloads.compacted(part)


def _facts(table: Any) -> list[Row]:
    columns = [table.column(name).to_pylist() for name in FACTS]
    columns[1] = [sys.intern(name) for name in columns[1]]  # one string a group, not one a row
    return list(map(Row._make, zip(*columns, strict=True)))
