"""``bench table``: what the experience table costs on top of the libraries that it is made of.

Each figure is a ratio taken in one run, so that the machine's speed falls out. Both sides of the append give the same
promise: the file and its name are on disk (fsync) before the next batch is written.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from laminar.experience.reader import Experience
from laminar.experience.schema import SCHEMA
from laminar.experience.table import ExperienceTable

__all__ = ["bench_table", "memory_while", "rows"]

GROUP = 8
BATCH = 64
"""Rows of one append: about what gathers from a few replicas while one append is written."""
ANSWER_DEADLINE = 120.0
"""Seconds for the querying process to start, and to answer."""
QUERY_EVERY = 1.0
"""Seconds between two queries: an eager user at a notebook."""
SQL = "select reward, weight_version, count(*) as n from experience group by all"


def bench_table(
    *,
    megabytes: int = 256,
    payload_gigabytes: float = 1.0,
    budget_bytes: int = 64 << 20,
    query_rows: int = 1_000_000,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measure appends, sampling, memory and queries.

    Parameters
    ----------
    megabytes
        Written by each side of one round of appends.
    payload_gigabytes, budget_bytes
        How much goes through how small a memory budget while the owner's memory is watched.
    query_rows
        Rows of the table that is queried while appends go on.

    Returns
    -------
    ``append_ratio`` (the lower of both row lengths; ours / pyarrow's rows/s) and the figures behind it;
    ``sample_ratio`` (a memory copy's seconds / a sample's); ``memory_growth`` (largest over the memory when the
    budget was first full); ``query_ratio`` (our seconds / plain Parquet's, during appends) and ``append_slowdown``.
    """
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        root = Path(folder)
        appends = {f"{tokens // 1024}k": _appends(root, tokens, megabytes, repeats) for tokens in (1024, 8192)}
        numbers: dict[str, Any] = {"append_ratio": min(side["ratio"] for side in appends.values())}
        numbers |= {
            f"append_{length}_{name}": value for length, side in appends.items() for name, value in side.items()
        }
        numbers |= _sample(root, repeats)
        numbers |= memory_while(root, payload_gigabytes, budget_bytes)
        numbers |= _queries(root, query_rows, repeats)
    return {**numbers, "durability": "fsync of each file and of its folder, on both sides", "batch_rows": BATCH}


def rows(first: int, count: int, tokens: int, seed: int = 0) -> pa.RecordBatch:
    """``count`` whole rows of ``tokens`` response tokens, numbered from ``first`` on, made without a loop."""
    random = np.random.default_rng(seed + first)
    numbers = np.arange(first, first + count)
    offsets = np.arange(count + 1, dtype=np.int32) * tokens
    prompts = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * 64, np.zeros(count * 64, np.int32))
    values: dict[str, Any] = {
        "trajectory_id": [f"g{n // GROUP:07d}-{n % GROUP}" for n in numbers],
        "group_id": [f"g{n // GROUP:07d}" for n in numbers],
        "prompt_id": [f"p{n // GROUP}" for n in numbers],
        "sample": numbers % GROUP,
        "group_size": np.full(count, GROUP),
        "weight_version": numbers // 10_000,
        "finish_version": numbers // 10_000,
        "prompt_ids": prompts,
        "response_ids": pa.ListArray.from_arrays(offsets, random.integers(0, 150_000, count * tokens, np.int32)),
        "logprobs": pa.ListArray.from_arrays(offsets, -random.random(count * tokens, np.float32)),
        "loss_mask": pa.ListArray.from_arrays(offsets, np.ones(count * tokens, np.int8)),
        "reward": random.integers(0, 2, count),
        "finish_reason": ["stop"] * count,
        "finished_at": numbers.astype(np.float64),
    }
    columns = [
        pa.array(values[field.name]).cast(field.type) if field.name in values else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _appends(root: Path, tokens: int, megabytes: int, repeats: int) -> dict[str, float]:
    """Rows/s and MB/s of the table and of pyarrow alone, in turn."""
    sample = rows(0, BATCH, tokens)
    count = max(4, (megabytes << 20) // sample.nbytes)
    ours, alone = [], []
    for repeat in range(repeats + 1):
        batches = [rows(n * BATCH, BATCH, tokens) for n in range(count)]
        table = ExperienceTable(str(root / f"append-{tokens}-{repeat}"))
        plain = root / f"plain-{tokens}-{repeat}"
        plain.mkdir()
        mine = _timed(partial(_append_all, table, batches))
        theirs = _timed(partial(_write_all, plain, batches))
        table.close()
        if repeat:
            ours.append(mine)
            alone.append(theirs)
    mine, theirs = statistics.median(ours), statistics.median(alone)
    return {
        "ratio": theirs / mine,
        "rows_per_second": count * BATCH / mine,
        "megabytes_per_second": count * sample.nbytes / mine / 1e6,
        "pyarrow_rows_per_second": count * BATCH / theirs,
    }


def _append_all(table: ExperienceTable, batches: list[pa.RecordBatch]) -> None:
    for batch in batches:
        table.append(batch)


def _write_all(folder: Path, batches: list[pa.RecordBatch]) -> None:
    for number, batch in enumerate(batches):
        _write(folder / f"{number}", batch)


def _write(path: Path, batch: pa.RecordBatch) -> None:
    """A batch as an Arrow file by pyarrow, with nothing around it."""
    with pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        sink.flush()
        os.fsync(sink.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _sample(root: Path, repeats: int) -> dict[str, float]:
    """A lease of 512 rows of 4k tokens as torch tensors, against a copy of the same bytes."""
    from laminar.experience.tensors import tensors

    table = ExperienceTable(str(root / "sample"))
    for n in range(512 // BATCH):
        table.append(rows(n * BATCH, BATCH, 4096))
    ours, copies, size = [], [], 0
    for _ in range(10 * repeats):
        began = time.perf_counter()
        lease = table.lease(512 // GROUP, version=10, staleness_ceiling=None, lessee="bench")
        assert lease is not None
        found = tensors(lease.table)
        ours.append(time.perf_counter() - began)
        table.release(lease.id)
        size = sum(tensor.nbytes for tensor in found.values())
        source = np.ones(size, np.uint8)
        copies.append(_timed(source.copy))
        del lease, found
    table.close()
    return {
        "sample_ratio": statistics.median(copies) / statistics.median(ours),
        "sample_milliseconds": statistics.median(ours) * 1e3,
        "sample_megabytes": size / 1e6,
    }


def memory_while(root: Path, gigabytes: float, budget_bytes: int) -> dict[str, float]:
    """The owner's memory while rows of 8k tokens go through a budget; they are trained as they come.

    ``memory_growth`` is the largest resident size in the last half over that in the first, from when the budget had
    been filled twice and segments were being compacted. Pages of mapped files are the kernel's and do not count.
    """
    table = ExperienceTable(str(root / "memory"), memory_bytes=budget_bytes, compact_after=16)
    process, seen, written, number = psutil.Process(), [], 0, 0
    while written < gigabytes * 1e9:
        batch = rows(number * BATCH, BATCH, 8192)
        written += batch.nbytes
        table.append(batch)
        lease = table.lease(BATCH // GROUP, version=number, staleness_ceiling=None, lessee="bench")
        assert lease is not None
        table.commit(lease.id, step=number + 1, version=number)
        number += 1
        del batch, lease
        if written > 2 * budget_bytes:
            info = process.memory_info()
            seen.append(info.rss - info.shared)
    table.close()
    return {
        "memory_growth": max(seen[len(seen) // 2 :]) / max(seen[: len(seen) // 2]),
        "memory_megabytes": max(seen) / 1e6,
        "memory_payload_gigabytes": written / 1e9,
        "memory_budget_megabytes": budget_bytes / 1e6,
    }


def _queries(root: Path, count: int, repeats: int) -> dict[str, float]:
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
    seconds = min(4.0, count / 50_000)
    context = multiprocessing.get_context("spawn")  # a notebook or a terminal is a process of its own, too
    ours, theirs = context.Pipe()
    asker = context.Process(target=_ask, args=(url, str(plain), repeats, theirs), daemon=True)
    asker.start()
    theirs.close()
    try:
        _hear(ours)
        quiet = _append_rate(table, fresh, lambda: False, seconds)
        ours.send("go")
        busy = _append_rate(table, fresh, ours.poll, ANSWER_DEADLINE)
        mine, alone = _hear(ours)
    finally:
        asker.kill()
        asker.join(10)
        table.close()
    return {
        "query_ratio": mine / alone,
        "query_milliseconds": mine * 1e3,
        "query_rows": float(count),
        "append_slowdown": 1 - busy / quiet,
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
        pairs.append((_timed(lambda: reader.query(SQL)), _timed(one_plain)))
        time.sleep(QUERY_EVERY)
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
        spent += _timed(partial(table.append, batch))
        appended += batch.num_rows
        time.sleep(0.05)
    return appended / spent
