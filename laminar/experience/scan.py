"""A DuckDB database over the files of a run's experience: the view ``experience``, and no way to anything else."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa

from laminar.experience.schema import LIFE_SCHEMA, SCHEMA
from laminar.experience.segment_files import SegmentFile
from laminar.experience.segments import Segments
from laminar.experience.store import Store

__all__ = ["connect"]

_VIEW = """
create view experience as
with lives as (
         select trajectory_id,
                arg_max({'state': state, 'step': step, 'version': version, 'reason': reason}, seq) as life
         from all_life group by trajectory_id
     )
select all_rows.*,
       case when drop_reason is not null then 'evicted' else coalesce(life.state, 'ready') end as state,
       life.step as trained_step,
       life.version as trained_version,
       coalesce(drop_reason, life.reason) as evicted_reason
from all_rows left join lives using (trajectory_id)
"""
"""A query that asks for no column of a row's life does not read the life log: DuckDB drops such a join."""


def connect(store: Store) -> Any:
    """A connection to a database in memory with the view, over the files as they are now.

    Parts are read when a query asks for them, only the columns it asks for; the others, which are small, now.

    Raises
    ------
    FileNotFoundError
        Files were compacted away since they were listed. So it may be, as ``duckdb.IOException``, in a query.
    """
    rows, life = Segments(store, "rows", SCHEMA), Segments(store, "life", LIFE_SCHEMA)
    life_files, row_files = life.files(), rows.files()
    connection = duckdb.connect(config={"python_enable_replacements": "false"})
    if not store.local:
        connection.register_filesystem(store.fs)
    _view(connection, "all_life", life, life_files)
    _view(connection, "all_rows", rows, row_files)
    connection.execute(_VIEW)
    connection.execute(f"set allowed_directories = [{_quoted(_url(store, ''))}]")
    connection.execute("set enable_external_access = false")
    return connection


def _view(connection: Any, name: str, segments: Segments, files: list[SegmentFile]) -> None:
    """All rows of a folder, each once."""
    loose = [segments.read(file) for file in files if not file.part]
    connection.register(f"{name}_loose", pa.concat_tables([segments.schema.empty_table(), *loose]))
    sources = [f"select * from {name}_loose"]
    if parts := [_quoted(_url(segments.store, segments.path(file))) for file in files if file.part]:
        sources.insert(0, f"select * from read_parquet([{', '.join(parts)}])")
    connection.execute(f"create view {name} as {' union all '.join(sources)}")


def _url(store: Store, name: str) -> str:
    path = store.path(name)
    return path if store.local else str(store.fs.unstrip_protocol(path))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
