"""Processes that own a table and write to it until they are done or killed. They say what was acknowledged."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from laminar.experience.table import ExperienceTable
from tests.experience.rows import group

__all__ = ["writer"]


@contextmanager
def writer(url: str, *, first: int, groups: int) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that appends groups ``first``, ``first + 1``, … and now and then trains on one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["laminar.experience.table", "pandas"])  # pyarrow imports it late
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_write, args=(url, first, groups, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(10)
        ours.close()


def _write(url: str, first: int, groups: int, acknowledged: Connection) -> None:
    table = ExperienceTable(url, compact_after=3)
    acknowledged.send(("open", []))
    for number in range(first, first + groups):
        name = f"g{number:06d}"
        for sample in range(2):
            acknowledged.send(("appended", table.append(group(name, samples=[sample], tokens=50))))
        if number % 3 == 0:
            lease = table.lease(1, version=0, staleness_ceiling=None, lessee="trainer")
            assert lease is not None
            table.commit(lease.id, step=number, version=0)
            acknowledged.send(("trained", lease.table["trajectory_id"].to_pylist()))
    table.close()
    acknowledged.send(("closed", []))
