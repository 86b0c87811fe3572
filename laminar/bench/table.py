"""``bench table``: what the experience table costs on top of the libraries that it is made of.

Each figure is a ratio taken in one run, so that the machine's speed falls out. Both sides of the append give the same
promise: the file and its name are on disk (fsync) before the next batch is written.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa

from laminar.bench import say
from laminar.bench.table_queries import queries
from laminar.bench.table_rows import BATCH, GROUP, rows, timed
from laminar.errors import UserError
from laminar.experience.table import ExperienceTable, Lease

if TYPE_CHECKING:
    import torch

__all__ = ["PARTS", "bench_table", "memory_while"]

MEMORY_DEADLINE = 600.0
"""Seconds for all of the payload to go through the memory budget."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; see ``bench_table``."""

    megabytes: int
    payload_gigabytes: float
    budget_bytes: int
    query_rows: int
    repeats: int


def bench_table(
    *,
    only: Sequence[str] = (),
    megabytes: int = 256,
    payload_gigabytes: float = 1.0,
    budget_bytes: int = 64 << 20,
    query_rows: int = 1_000_000,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measure appends, sampling, memory and queries.

    Parameters
    ----------
    only
        Names of ``PARTS``; none: all of them.
    megabytes
        Written by each side of one round of appends.
    payload_gigabytes, budget_bytes
        How much goes through how small a memory budget while the owner's memory is watched.
    query_rows
        Rows of the table that is queried while appends go on.
    repeats
        Rounds of which the median counts.

    Returns
    -------
    ``append_ratio`` (the lower of both row lengths; ours / pyarrow's rows/s) and the figures behind it;
    ``sample_ratio`` (a memory copy's seconds / a sample's); ``memory_growth`` (largest over the memory when the
    budget was first full); ``query_ratio`` (our seconds / plain Parquet's, during appends) and ``append_slowdown``.

    Raises
    ------
    UserError
        There is no such part.
    """
    if unknown := sorted(set(only) - set(PARTS)):
        raise UserError(f"bench table has no part `{unknown[0]}`; there are: {', '.join(PARTS)}")
    sizes = Sizes(megabytes, payload_gigabytes, budget_bytes, query_rows, repeats)
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for name, measure in PARTS.items():
            if not only or name in only:
                say(f"table: {name}")
                numbers |= measure(Path(folder), sizes)
    return {**numbers, "durability": "fsync of each file and of its folder, on both sides", "batch_rows": BATCH}


def _append(root: Path, sizes: Sizes) -> dict[str, float]:
    """Appends of short and of long rows."""
    sides = {f"{n // 1024}k": _appends(root, n, sizes.megabytes, sizes.repeats) for n in (1024, 8192)}
    lowest = {"append_ratio": min(side["ratio"] for side in sides.values())}
    return lowest | {f"append_{length}_{name}": value for length, side in sides.items() for name, value in side.items()}


def _appends(root: Path, tokens: int, megabytes: int, repeats: int) -> dict[str, float]:
    """Rows/s and MB/s of the table and of pyarrow alone, in turn; the first round warms up."""
    sample = rows(0, BATCH, tokens)
    count = max(4, (megabytes << 20) // sample.nbytes)
    rounds = []
    for repeat in range(repeats + 1):
        batches = [rows(n * BATCH, BATCH, tokens) for n in range(count)]
        table = ExperienceTable(str(root / f"append-{tokens}-{repeat}"))
        plain = root / f"plain-{tokens}-{repeat}"
        plain.mkdir()
        ours = timed(partial(_append_all, table, batches))
        table.close()  # a compaction that still runs would slow the other side down
        rounds.append((ours, timed(partial(_write_all, plain, batches))))
    mine, alone = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    return {
        "ratio": statistics.median(theirs / ours for ours, theirs in rounds[1:]),
        "rows_per_second": count * BATCH / mine,
        "megabytes_per_second": count * sample.nbytes / mine / 1e6,
        "pyarrow_rows_per_second": count * BATCH / alone,
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


def _sample(root: Path, sizes: Sizes) -> dict[str, float]:
    """A lease of 512 rows of 4k tokens as torch tensors, against one copy of as many bytes, in turn.

    Both write to where their last round wrote, so that neither pays for pages that the kernel has to clear first, and
    each finds in the processor's caches what the other left there. Rows lie in Arrow's memory, as on the data worker.
    """
    table = ExperienceTable(str(root / "sample"))
    for n in range(512 // BATCH):
        table.append(pa.concat_batches([rows(n * BATCH, BATCH, 4096)]))
    size = sum(tensor.nbytes for tensor in _sampled(table)[1].values())
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    held: list[Any] = []
    rounds = []
    for _ in range(20 * sizes.repeats):
        held.clear()
        table.release_all("bench")
        ours = timed(lambda: held.append(_sampled(table)))
        rounds.append((ours, timed(partial(np.copyto, target, source))))
    table.close()
    return {
        "sample_ratio": statistics.median(copy / ours for ours, copy in rounds),
        "sample_milliseconds": statistics.median(ours for ours, _ in rounds) * 1e3,
        "sample_megabytes": size / 1e6,
    }


def _sampled(table: ExperienceTable) -> tuple[Lease, dict[str, torch.Tensor]]:
    from laminar.experience.tensors import tensors

    lease = table.lease(512 // GROUP, version=10, staleness_ceiling=None, lessee="bench")
    assert lease is not None
    return lease, tensors(lease.table)


def _memory(root: Path, sizes: Sizes) -> dict[str, float]:
    """In a process of its own: what other parts left behind would hide a growth."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        watched = pool.apply_async(memory_while, (root, sizes.payload_gigabytes, sizes.budget_bytes))
        return watched.get(MEMORY_DEADLINE)


def _queries(root: Path, sizes: Sizes) -> dict[str, float]:
    return queries(root, sizes.query_rows, sizes.repeats)


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


PARTS: dict[str, Callable[[Path, Sizes], dict[str, Any]]] = {
    "append": _append,
    "sample": _sample,
    "memory": _memory,
    "queries": _queries,
}
"""What is measured by itself, in this order."""
