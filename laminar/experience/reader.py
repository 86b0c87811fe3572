"""The experience of a run, read from its files alone: while it goes on, from any process, and afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from laminar.errors import LaminarError, UserError
from laminar.experience.schema import LIFE_SCHEMA, SCHEMA
from laminar.experience.segments import SegmentFile, Segments
from laminar.experience.store import Store

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Experience"]

_TRIES = 10
"""How often files may be compacted away between listing and reading them before something must be wrong."""

_VIEW = """
create view experience as
with trajectories as (select * from parts union all select * from segments),
     lives as (
         select trajectory_id,
                arg_max({'state': state, 'step': step, 'version': version, 'reason': reason}, seq) as life
         from events group by trajectory_id
     )
select trajectories.*,
       case when drop_reason is not null then 'evicted' else coalesce(life.state, 'ready') end as state,
       life.step as trained_step,
       life.version as trained_version,
       coalesce(drop_reason, life.reason) as evicted_reason
from trajectories left join lives using (trajectory_id)
"""


class Experience:
    """The trajectories of one run, read only.

    Each call reads the files as they are then. The view ``experience`` has the columns of ``SCHEMA`` and

    - ``state``: ``ready`` (not trained yet; leases are known to the owner only), ``trained`` or ``evicted``;
    - ``trained_step``, ``trained_version``: the step that trained it and the version that this step updated;
    - ``evicted_reason``: why it was evicted, or dropped when it was scored.

    Parameters
    ----------
    run_url
        The run's folder: a path or an fsspec URL.
    """

    def __init__(self, run_url: str) -> None:
        self.url = run_url
        self._store = Store(f"{run_url.rstrip('/')}/experience")
        self._rows = Segments(self._store, "rows", SCHEMA)
        self._lives = Segments(self._store, "life", LIFE_SCHEMA)

    def query(self, sql: str) -> pa.Table:
        """The answer of DuckDB to one ``select`` over the view ``experience``.

        Raises
        ------
        UserError
            The SQL is wrong or does more than read, or there is no experience at the URL.
        """
        with self._connect() as connection:
            try:
                statements = connection.extract_statements(sql)
                if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
                    raise UserError(f"experience is read only: give one select statement, not {_one_line(sql)!r}")
                return connection.sql(statements[0]).to_arrow_table()
            except duckdb.Error as error:
                raise UserError(f"SQL: {_one_line(str(error))}") from error

    def to_arrow(self) -> pa.Table:
        """All of it, in no particular order."""
        return self.query("select * from experience")

    def to_pandas(self) -> pd.DataFrame:
        """All of it as a data frame, in no particular order."""
        return self.to_arrow().to_pandas()

    def head(self, n: int = 5) -> pa.Table:
        """The ``n`` trajectories that finished first."""
        return self.query(f"select * from experience order by finished_at, trajectory_id limit {int(n)}")

    def _connect(self) -> Any:
        """A database in memory with the view and no way to anything else: no files, no Python variables."""
        if not self._store.exists("format.json"):
            raise UserError(f"there is no experience at {self.url}: give the folder of a run that has begun")
        events, parts, segments = self._scan()
        connection = duckdb.connect(config={"enable_external_access": "false", "python_enable_replacements": "false"})
        connection.register("events", events)
        connection.register("parts", parts)
        connection.register("segments", segments)
        connection.execute(_VIEW)
        return connection

    def _scan(self) -> tuple[pa.Table, Any, pa.Table]:
        """The life log, the compacted rows (scanned when asked for) and the others (mapped or read)."""
        for _ in range(_TRIES):
            files = self._rows.files()
            try:
                events = _read(self._lives, self._lives.files())
                segments = _read(self._rows, [file for file in files if not file.part])
            except FileNotFoundError:
                continue
            paths = [self._store.path(f"{self._rows.folder}/{file.name}") for file in files if file.part]
            if not paths:
                return events, SCHEMA.empty_table(), segments
            return events, ds.dataset(paths, SCHEMA, format="parquet", filesystem=self._store.fs), segments
        raise LaminarError(f"files vanished {_TRIES} times while {self.url} was read; try again")


def _read(segments: Segments, files: list[SegmentFile]) -> pa.Table:
    return pa.concat_tables([segments.schema.empty_table(), *(segments.read(file) for file in files)])


def _one_line(text: str) -> str:
    """What a message or a statement says, without the drawing of where.

    >>> _one_line("Binder Error: no column foo\\nCandidates: bar\\n\\nLINE 1: select foo\\n               ^")
    'Binder Error: no column foo Candidates: bar'
    """
    return " ".join(text.split("\n\n")[0].split())
