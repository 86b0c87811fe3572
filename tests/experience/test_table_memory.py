"""What the table's owner needs beside the rows that it keeps: not more and more."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster, Worker
from distributed.core import rpc
from distributed.protocol import to_serialize

from laminar.bench.table_rows import GROUP, rows
from laminar_dask.table import TablePlugin

STEPS, BATCH, TOKENS, APPENDS, WINDOW = 1200, 16, 24, 4, 200
OF_KEPT = 4.0
"""Most bytes by which the owner may grow for each byte of rows that it keeps. They are short ones: what the index
knows of a row, about 0.8 KiB, is more than its tokens."""

COMPACTIONS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import psutil
import pyarrow as pa
from laminar.bench.table_rows import rows
from laminar.experience.table import ExperienceTable

def resident():
    pa.default_memory_pool().release_unused()  # of this thread; others have to do so by themselves
    info = psutil.Process().memory_info()
    return info.rss - info.shared

thread = ThreadPoolExecutor(1)
table = ExperienceTable(sys.argv[1], memory_bytes=0, compact_after=8, compact_in=thread)
sizes = []
for number in range(72):
    batch = rows(64 * number, 64, 4096)
    table.append(batch)
    thread.submit(int).result(60)
    if number % 8 == 7:
        sizes.append(resident())
print(json.dumps({"sizes": sizes, "compacted": 8 * batch.nbytes}))
"""


def test_a_compaction_gives_back_the_memory_that_it_used(tmp_path: Path) -> None:
    """The thread that compacts is idle for long; Arrow's memory is kept by the thread that used it."""
    command = [sys.executable, "-c", COMPACTIONS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    numbers = json.loads(done.stdout)
    assert len(numbers["sizes"]) == 9, "eight compactions, a merge of their parts, and one more"
    assert numbers["sizes"][-1] - numbers["sizes"][0] < numbers["compacted"] / 2, numbers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_data_worker_grows_by_the_rows_that_it_keeps_over_1200_steps(tmp_path: Path) -> None:
    """verl #429, #630, #3453: host memory grows until a process is killed."""
    seen = asyncio.run(steps(str(tmp_path)))
    before, after = (min(own for own, _ in seen[end - WINDOW : end]) for end in (STEPS // 2, STEPS))  # not compacting
    kept_before, kept_after = seen[STEPS // 2 - 1][1], seen[-1][1]
    print(f"{before >> 10} -> {after >> 10} KiB, rows {kept_before >> 10} -> {kept_after >> 10} KiB")
    assert kept_after > kept_before
    assert after - before < OF_KEPT * (kept_after - kept_before)


async def steps(url: str) -> list[tuple[int, int]]:
    """Steps of a trainer with a data worker in a process of its own. After each, the worker's own bytes, and those of
    the rows that it keeps."""
    options: dict[str, Any] = {"n_workers": 1, "processes": True, "threads_per_worker": 8, "dashboard_address": None}
    cluster = LocalCluster(**options, resources={"data": 1}, asynchronous=True)
    async with cluster, Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(1, timeout=60)
        await client.register_plugin(TablePlugin(url))
        [(address, pid)] = (await client.run(os.getpid)).items()
        process, data, seen = psutil.Process(pid), rpc(address), []
        for step in range(STEPS):
            await one_step(data, step)
            info = process.memory_info()
            kept = (await client.run(rows_kept))[address] if step % WINDOW == WINDOW - 1 else 0
            seen.append((info.rss - info.shared, kept))
        await data.close_rpc()
    return seen


async def one_step(data: Any, step: int) -> None:
    """Tokens are streamed, rows appended, leased and trained."""
    numbers = range(BATCH * step, BATCH * (step + 1))
    names = [f"g{number // GROUP:07d}-{number % GROUP}" for number in numbers]
    for start in (0, TOKENS // 2):
        half = TOKENS // 2
        await data.laminar_partials(items=[(name, 1, step, start, [1] * half, [-0.5] * half) for name in names])
    batches = [rows(first, BATCH // APPENDS, TOKENS) for first in numbers[:: BATCH // APPENDS]]
    await asyncio.gather(*(data.laminar_append(batch=to_serialize(batch)) for batch in batches))
    ask = {"groups": BATCH // GROUP, "version": step, "staleness_ceiling": None, "lessee": "trainer"}
    lease = await data.laminar_lease(**ask, deadline=30.0)
    await data.laminar_commit(lease=lease["lease"], step=step + 1, version=step, groups=lease["groups"])


def rows_kept(dask_worker: Worker) -> int:
    return int(dask_worker.plugins["laminar-table"].table.memory_used())
