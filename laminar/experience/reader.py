"""The experience of a run, read from its files alone: while it goes on, from any process, and afterwards."""

from __future__ import annotations

import html
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from laminar.errors import LaminarError, UserError
from laminar.experience.scan import connect
from laminar.experience.store import Store

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

__all__ = ["Experience"]

_TRIES = 10
"""How often files may be compacted away between listing and reading them before something must be wrong."""

_HEAD = "trajectory_id, state, reward, weight_version, trained_step, finish_reason, prompt_text, response_text"


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

    def query(self, sql: str) -> pa.Table:
        """The answer of DuckDB to one ``select`` over the view ``experience``; sums of integers are 64-bit integers.

        Raises
        ------
        UserError
            The SQL is wrong or does more than read, or there is no experience at the URL.
        """
        if not self._store.exists("format.json"):
            raise UserError(f"there is no experience at {self.url}: give the folder of a run that has begun")
        for _ in range(_TRIES):
            try:
                with connect(self._store) as connection:
                    statements = connection.extract_statements(sql)
                    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
                        raise UserError(f"experience is read only: give one select statement, not {_one_line(sql)!r}")
                    return _narrow(connection.sql(statements[0]).to_arrow_table())
            except (FileNotFoundError, duckdb.IOException):
                continue  # compacted meanwhile: its rows are in another file
            except duckdb.Error as error:
                raise UserError(f"SQL: {_one_line(str(error))}") from error
        raise LaminarError(f"files vanished {_TRIES} times while {self.url} was read; try again")

    def to_arrow(self) -> pa.Table:
        """All of it, in no particular order."""
        return self.query("select * from experience")

    def to_pandas(self) -> pd.DataFrame:
        """All of it as a data frame, in no particular order."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """All of it as a polars data frame, in no particular order.

        Raises
        ------
        UserError
            polars is not installed.
        """
        try:
            import polars as pl
        except ImportError as error:
            raise UserError(
                "polars is not installed: `pip install polars`, or use to_pandas() or to_arrow()"
            ) from error
        frame = pl.from_arrow(self.to_arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame

    def head(self, n: int = 5) -> pd.DataFrame:
        """The ``n`` trajectories that finished first, for people: their life, reward and text."""
        return self.query(
            f"select {_HEAD} from experience order by finished_at, trajectory_id limit {int(n)}"
        ).to_pandas()

    def _repr_html_(self) -> str:
        """How many trajectories are where, and the newest of them."""
        states = self.query("select state, count(*) as n from experience group by all order by state").to_pylist()
        counts = ", ".join(f"{line['n']} {line['state']}" for line in states) or "no trajectory yet"
        newest = self.query(f"select {_HEAD} from experience order by finished_at desc, trajectory_id limit 5")
        cells = [[_cell(value) for value in line.values()] for line in newest.to_pylist()]
        head = "".join(f"<th>{name}</th>" for name in newest.column_names)
        body = "".join(f"<tr>{''.join(line)}</tr>" for line in cells)
        return f"<p><b>experience</b> of {html.escape(self.url)}: {counts}</p><table><tr>{head}</tr>{body}</table>"


def _narrow(table: pa.Table) -> pa.Table:
    """DuckDB's 128-bit integers, which Arrow only has as decimals, as 64-bit ones where all of them fit.

    >>> _narrow(pa.table({"n": pa.array([2560], pa.decimal128(38, 0))})).to_pylist()
    [{'n': 2560}]
    """
    for place, field in enumerate(table.schema):
        if field.type == pa.decimal128(38, 0):
            with suppress(pa.ArrowInvalid):
                table = table.set_column(place, field.name, table.column(place).cast(pa.int64()))
    return table


def _cell(value: Any) -> str:
    """A table's cell; long text is cut, the whole is there to hover over.

    >>> _cell("<b>"), _cell(None), _cell(0.5)
    ('<td title="&lt;b&gt;">&lt;b&gt;</td>', '<td title=""></td>', '<td title="0.5">0.5</td>')
    """
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    short = text if len(text) <= 120 else text[:119] + "…"
    return f'<td title="{html.escape(text)}">{html.escape(short)}</td>'


def _one_line(text: str) -> str:
    """What a message or a statement says, without the drawing of where.

    >>> _one_line("Binder Error: no column foo\\nCandidates: bar\\n\\nLINE 1: select foo\\n               ^")
    'Binder Error: no column foo Candidates: bar'
    """
    return " ".join(text.split("\n\n")[0].split())
