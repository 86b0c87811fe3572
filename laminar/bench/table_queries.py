"""The queries of ``bench table``: a group-by over many rows while appends go on, against DuckDB on plain Parquet."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from laminar.bench.table_rows import BATCH, rows, timed
from laminar.experience.reader import Experience
from laminar.experience.schema import SCHEMA
from laminar.experience.table import ExperienceTable

__all__ = ["queries"]

ANSWER_DEADLINE = 120.0
"""Seconds for the querying process to start, and to answer."""
QUERY_EVERY = 1.0
"""Seconds between two queries: an eager user at a notebook."""
SQL = "select reward, weight_version, count(*) as n from experience group by all"


def queries(root: Path, count: int, repeats: int) -> dict[str, float]:
    """A group-by while appends go on, against DuckDB on one plain Parquet file of the same rows."""
    url, plain = str(root / "query"), root / "plain.parquet"
    table = ExperienceTable(url, memory_bytes=16 << 20)
    with pq.ParquetWriter(plain, SCHEMA, compression="zstd") as writer:
        for first in range(0, count, 8192):
            batch = rows(first, min(8192, count - first), 32)
            table.append(batch)
            writer.write_batch(batch)
    table.close()
    table = ExperienceTable(url, memory_bytes=16 << 20)
    fresh = _endless(count)
    seconds = min(12.0, count / 80_000)  # as long as the queries take: compactions fall into each part alike
    context = multiprocessing.get_context("spawn")  # a notebook or a terminal is a process of its own, too
    ours, theirs = context.Pipe()
    asker = context.Process(target=_ask, args=(url, str(plain), repeats, theirs), daemon=True)
    asker.start()
    theirs.close()
    try:
        _hear(ours)
        _append_rate(table, fresh, lambda: False, seconds / 3)  # warms up
        before = _append_rate(table, fresh, lambda: False, seconds)
        ours.send("go")
        busy = _append_rate(table, fresh, ours.poll, ANSWER_DEADLINE)
        mine, alone = _hear(ours)
        after = _append_rate(table, fresh, lambda: False, seconds)
    finally:
        asker.kill()
        asker.join(10)
        table.close()
    return {
        "query_ratio": mine / alone,
        "query_milliseconds": mine * 1e3,
        "query_rows": float(count),
        "append_slowdown": 1 - busy / statistics.fmean([before, after]),
    }


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_DEADLINE):
        raise TimeoutError(f"the process that queries said nothing for {ANSWER_DEADLINE:.0f} s")
    return pipe.recv()


def _ask(url: str, plain: str, repeats: int, pipe: Connection) -> None:
    """In a process beside the owner: median seconds of the query through the reader, and of a plain file."""
    reader = Experience(url)

    def one_plain() -> None:
        with duckdb.connect() as connection:
            connection.execute(f"create view experience as select * from read_parquet('{plain}')")
            connection.sql(SQL).to_arrow_table()

    pipe.send("ready")
    pipe.recv()
    pairs = []
    for _ in range(repeats + 1):
        times = []
        for ask in (partial(reader.query, SQL), one_plain):
            times.append(timed(ask))
            time.sleep(QUERY_EVERY)
        pairs.append(times)
    pipe.send([statistics.median(side) for side in zip(*pairs[1:], strict=True)])


def _endless(first: int) -> Iterator[pa.RecordBatch]:
    while True:
        yield rows(first, BATCH, 1024)
        first += BATCH


def _append_rate(
    table: ExperienceTable, batches: Iterator[pa.RecordBatch], done: Callable[[], bool], seconds: float
) -> float:
    """Rows a second of appending, with a pause of 50 ms after each batch, until done or the time is up."""
    appended, spent, end = 0, 0.0, time.perf_counter() + seconds
    while not done() and time.perf_counter() < end:
        batch = next(batches)
        spent += timed(partial(table.append, batch))
        appended += batch.num_rows
        time.sleep(0.05)
    return appended / spent
