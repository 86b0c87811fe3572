"""Metrics of a run as Parquet part files: written while the run goes on, readable by anyone at any moment.

``<run>/metrics/<kind>-00001.parquet``, ``-00002``, ...: each part is complete when it appears under its name
and is never written again, so DuckDB's ``read_parquet('<run>/metrics/steps-*.parquet', union_by_name=true)``
works while the run goes on.

Columns that ``summary`` and ``report`` look for; every one may be missing, and others are kept as they are.

``steps``, one row an optimizer step
    ``step``, ``version`` (being trained *to*), ``rows`` (trajectories trained on), ``tokens`` (of responses),
    ``reward_mean``, ``loss``, ``grad_norm``, ``learning_rate``, ``entropy``, ``kl`` (engine against trainer),
    ``importance_ratio_mean``, ``importance_ratio_max``, ``clip_fraction``, ``truncated_fraction``,
    ``staleness_mean``, ``staleness_max`` (versions), ``response_length_mean``, ``response_length_max``
    (tokens),
    ``seconds`` (the trainer's work on the step), ``wait_seconds`` (before it, for complete groups),
    ``trainer_wait_fraction`` (of this step), ``tokens_per_second`` (generated, since the step before),
    ``versions_per_trajectory_max``.
``replicas``, one row a replica and look
    ``name``, ``version``, ``state``, ``running``, ``waiting``, ``kv_used``, ``kv_total`` (tokens), ``up``
    and ``busy`` (the replica's own clocks: seconds since its start, and of these generating).
``relays``, one row a relay and look
    ``name``, ``version``, ``lag`` (versions behind the newest), ``position`` (in its last chain; 0 sent first),
    ``bytes_in``, ``bytes_out`` (of the data plane), ``repairs`` (relays it passed over), ``bytes`` (of shared
    memory), ``held`` (versions), ``transport``.
``evaluations``, one row a held-out evaluation
    ``step``, ``version``, ``reward_mean``, ``greedy_accuracy``, ``prompts``.
``repack``, one row a plan, a release of a replica, a hand-over, or what a release turned out to have won
    ``action``, ``plan`` (its number), ``why``, ``source``, ``targets``, ``trajectories``, ``stayed``, ``idle``,
    ``releases``, ``gain_expected``, ``cost_expected``, ``gain_measured`` (replica seconds), ``seconds`` (median of a
    hand-over; of a plan, what it took).
``events``, anything else worth keeping: ``level``, ``text``.

A writer takes any other lower-case name, too. Every row gets ``time`` (unix seconds) unless it has one.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from laminar.experience.store import Store

__all__ = ["MetricsWriter", "read_metrics", "rows_to_table"]

_FOLDER = "metrics"
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_PART = re.compile(rf"({_KIND.pattern})-(\d+)\.parquet")


class MetricsWriter:
    """Collects rows and writes them as part files. Thread-safe; ``flush`` blocks on the store.

    Part numbers go on from the newest part found: a writer that took over from a dead one adds to its files.

    Parameters
    ----------
    run_url
        The run's folder, any fsspec URL.
    every_rows, every_seconds
        ``write`` flushes a kind that has this many rows, or whose oldest row is this old. There is no timer:
        rows of a quiet kind stay in memory until the next ``write`` of that kind, ``flush`` or ``close``.
        Where ``write`` must not touch the store (on an event loop), give ``every_seconds=math.inf`` and call
        ``flush`` from a thread.
    clock
        Unix seconds.

    Raises
    ------
    LaminarError
        When the store refuses a write. The rows are kept and go out with the next flush.
    """

    def __init__(
        self,
        run_url: str,
        *,
        every_rows: int = 1000,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = Store(run_url)
        self._store.fs.makedirs(self._store.path(_FOLDER), exist_ok=True)
        self._next = {kind: number + 1 for kind, number, _ in _parts(self._store)}
        self._every_rows = every_rows
        self._every_seconds = every_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._oldest: dict[str, float] = {}
        self._families: dict[str, dict[str, str]] = {}

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Add one row. Nested values are kept as JSON text; NumPy and torch scalars as plain numbers.

        Raises
        ------
        TypeError
            When a column gets text after numbers or the like; the row is not added.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"a kind of metrics is a lower-case name, not {kind!r}")
        now = self._clock()
        plain = {name: _plain(value) for name, value in {"time": now, **row}.items()}
        with self._lock:
            self._check(kind, plain)
            self._oldest.setdefault(kind, now)
            rows = self._rows.setdefault(kind, [])
            rows.append(plain)
            if len(rows) >= self._every_rows or now - self._oldest[kind] >= self._every_seconds:
                self._flush(kind)

    def flush(self, older_than: float = 0.0) -> None:
        """Write the rows that are still in memory; only of kinds with a row at least so many seconds old."""
        with self._lock:
            now = self._clock()
            for kind in [kind for kind, since in self._oldest.items() if now - since >= older_than]:
                self._flush(kind)

    def close(self) -> None:
        """The last flush. Idempotent."""
        self.flush()

    def _check(self, kind: str, row: Mapping[str, Any]) -> None:
        """One column, one type: what would make a later read fail fails here, by name."""
        families = {name: _family(value) for name, value in row.items() if value is not None}
        seen = self._families.setdefault(kind, {})
        for name, family in families.items():
            if seen.get(name, family) != family:
                raise TypeError(f"metric {kind}.{name} was {seen[name]}, now it is {family}: {row[name]!r}")
        seen.update(families)

    def _flush(self, kind: str) -> None:
        rows = self._rows.get(kind)
        if not rows:
            return
        number = self._next.get(kind, 1)
        self._store.write(f"{_FOLDER}/{kind}-{number:05d}.parquet", _parquet(rows_to_table(rows)))
        self._next[kind] = number + 1
        del self._rows[kind]
        del self._oldest[kind]
        pa.default_memory_pool().release_unused()  # each thread that flushes would keep 2 MB


def read_metrics(run_url: str, kind: str) -> pa.Table:
    """All rows of one kind, in the order written; columns are the union over the parts.

    A run that has none yet gives a table without rows and columns.
    """
    store = Store(run_url)
    parts = [name for found, _, name in _parts(store) if found == kind]
    tables = [pq.read_table(pa.BufferReader(store.read(name))) for name in parts]
    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


def rows_to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table whose columns are the union of their keys.

    Example
    -------
    >>> rows_to_table([{"step": 1}, {"step": 2, "loss": 0.5}]).to_pydict()
    {'step': [1, 2], 'loss': [None, 0.5]}
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([_plain(row.get(name)) for row in rows]) for name in names})


def _parquet(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue()


def _column(values: list[Any]) -> pa.Array:
    if any(isinstance(value, float) for value in values):
        values = [None if value is None else float(value) for value in values]
    return pa.array(values)


def _family(value: Any) -> str:
    if isinstance(value, bool):
        return "a flag"
    return "a number" if isinstance(value, (int, float)) else "text"


def _plain(value: Any) -> Any:
    """A Parquet scalar: NumPy and torch scalars unwrapped, containers as JSON text."""
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, default=str)
    return str(value)


def _parts(store: Store) -> list[tuple[str, int, str]]:
    """(kind, number, name) of every part there is, in order."""
    names = store.names(_FOLDER)
    return sorted((m[1], int(m[2]), f"{_FOLDER}/{name}") for name in names if (m := _PART.fullmatch(name)))
