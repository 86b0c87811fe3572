"""The data worker's half of the experience table: RPCs over ``ExperienceTable`` and ``PartialPool``.

Register it with any cluster; only a worker with the Dask resource ``data`` opens the table. Blocking work runs on
one thread of its own, so the worker's event loop stays free and calls take effect in the order in which they came.
Appends that arrive while one is being written are written together, as the next. Sequences in answers arrive
as tuples: Dask's messages know no lists.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import to_serialize

from laminar.errors import LaminarError
from laminar.experience.partial_pool import PartialPool
from laminar.experience.samplers import Rules
from laminar.experience.store import Store
from laminar.experience.table import ExperienceTable
from laminar_dask._compat import add_metric, remove_metric
from laminar_dask.waiting import within

__all__ = ["TablePlugin"]

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often one who waits for groups looks again although nothing happened: leases expire by time alone."""

SYNC_SECONDS = 1.0
"""How often partial responses are put on disk: what a loss of the machine's power may cost of them."""


class TablePlugin(WorkerPlugin):
    """Owns the experience table and the partial-response pool of a run.

    Parameters
    ----------
    run_url
        The run's folder: a path or an fsspec URL. What is there is recovered.
    rules
        How groups are chosen to be trained on, and which are evicted instead.
    lease_seconds
        After which a lease that was neither committed nor released ends; None: never.
    partial_bytes
        Most bytes of partial responses in memory.

    Attributes
    ----------
    table, partials
        Only on the data worker.
    """

    name = "laminar-table"

    def __init__(
        self,
        run_url: str,
        rules: Rules | None = None,
        *,
        lease_seconds: float | None = 3600.0,
        partial_bytes: int = 1 << 30,
    ) -> None:
        self.run_url = run_url
        self.rules = rules or Rules()
        self.lease_seconds = lease_seconds
        self.partial_bytes = partial_bytes
        self._open = False

    async def setup(self, worker: Worker) -> None:
        """Open the table and answer for it, on the data worker; nothing elsewhere."""
        if "data" not in worker.state.total_resources:
            return
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laminar-table")
        self._queue: list[tuple[pa.RecordBatch, asyncio.Future[list[str]]]] = []
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._asking: dict[str, object] = {}
        try:
            self.table = await self._do(lambda: ExperienceTable(self.run_url, rules=self.rules))
            journal, memory = _journal(self.run_url), self.partial_bytes
            self.partials = await self._do(lambda: PartialPool(journal, memory_bytes=memory))
        except LaminarError:
            self._thread.shutdown()
            raise
        worker.handlers.update(self._handlers())
        add_metric(worker, "laminar_table", lambda worker: self._counts())
        self._syncing = asyncio.create_task(self._sync())
        self._open = True

    async def teardown(self, worker: Worker) -> None:
        """Close the files. What was acknowledged is on disk already."""
        if not self._open:
            return
        self._open = False
        for name in self._handlers():
            worker.handlers.pop(name, None)
        remove_metric(worker, "laminar_table")
        self._asking.clear()
        self._notify()
        self._syncing.cancel()
        await self._do(self.partials.close)
        await self._do(self.table.close)
        self._thread.shutdown()

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        calls = (
            self.laminar_append,
            self.laminar_partials,
            self.laminar_resume,
            self.laminar_lease,
            self.laminar_commit,
            self.laminar_release,
            self.laminar_rewind,
            self.laminar_evict,
            self.laminar_counts,
        )
        return {call.__name__: call for call in calls}

    async def laminar_append(self, batch: pa.RecordBatch) -> dict[str, list[str]]:
        """Add rows; they are on disk when this answers. Their partial responses are forgotten.

        ``batch`` travels as ``to_serialize(record_batch(rows))``. The answer's ``accepted`` has the ids that are
        new: after a lost answer the same batch may be sent again, and none of it is.
        """
        done: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._queue.append((batch, done))
        async with self._writing:
            if not done.done():  # whoever comes first writes for all that have queued up meanwhile
                queue, self._queue = self._queue, []
                await self._append([batch for batch, _ in queue], [done for _, done in queue])
        return {"accepted": await done}

    async def laminar_partials(self, items: Iterable[Sequence[Any]]) -> dict[str, int]:
        """Take up tokens, and turns, that a replica's running trajectories have new: the fields of ``Item``, whose
        ``key`` is the trajectory's id."""
        return {"accepted": await self._do(self.partials.extend, items)}

    async def laminar_resume(self, keys: list[tuple[str, int]]) -> list[dict[str, Any] | None]:
        """The prefix that each new attempt ``[key, run_id]`` begins with: ``version``, ``ids``, ``logprobs``,
        ``turn``."""
        found = await self._do(lambda: [self.partials.resume(key, run_id) for key, run_id in keys])
        return [None if response is None else asdict(response) for response in found]

    async def laminar_lease(
        self, groups: int, version: int, staleness_ceiling: int | None, lessee: str, deadline: float
    ) -> dict[str, Any]:
        """Lease ``groups`` groups as soon as there are enough, waiting for up to ``deadline`` seconds.

        Returns
        -------
        ``{"status": "OK", "lease", "groups", "table"}``; ``{"status": "waiting", "why"}`` when the time is up;
        ``{"status": "superseded"}`` when the same lessee asked again or released all in the meantime, so that
        a call left behind by a dead trainer takes nothing, and when the worker closes.
        """
        call = self._asking[lessee] = object()
        try:
            return await self._lease(call, groups, version, staleness_ceiling, lessee, deadline)
        finally:
            if self._asking.get(lessee) is call:
                del self._asking[lessee]

    async def laminar_commit(self, lease: str, step: int, version: int, groups: Iterable[str] = ()) -> None:
        """Note that a lease was trained. With its ``groups`` it also counts after this worker was restarted."""
        await self._do(lambda: self.table.commit(lease, step=step, version=version, groups=list(groups)))

    async def laminar_release(self, lessee: str) -> int:
        """Take back all that a lessee holds; the number of its leases."""
        self._asking.pop(lessee, None)
        released = await self._do(self.table.release_all, lessee)
        self._notify()
        return released

    async def laminar_rewind(self, step: int) -> int:
        """Make ready again what was trained after ``step``; the number of rows."""
        rows = await self._do(self.table.rewind, step)
        self._notify()
        return rows

    async def laminar_evict(self, groups: Iterable[str], reason: str) -> int:
        """Give groups up, with the reason; the number of rows. Rows still to come will follow them."""
        rows = await self._do(self.table.evict, list(groups), reason)
        self._notify()
        return rows

    async def laminar_counts(self) -> dict[str, int]:
        """``ExperienceTable.counts``, ``lessees_waiting``, ``partials`` held, their ``partials_bytes``, and how many
        items were ``partials_refused`` or ``partials_overflowed``."""
        return self._counts()

    def _counts(self) -> dict[str, int]:
        return {
            **self.table.counts(),
            "partials": len(self.partials),
            "partials_bytes": self.partials.nbytes,
            "partials_refused": self.partials.refused,
            "partials_overflowed": self.partials.overflowed,
            "lessees_waiting": len(self._asking),
        }

    async def _lease(
        self,
        call: object,
        groups: int,
        version: int,
        staleness_ceiling: int | None,
        lessee: str,
        deadline: float,
    ) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        ask = partial(
            self.table.lease,
            groups,
            version=version,
            staleness_ceiling=staleness_ceiling,
            lessee=lessee,
            seconds=self.lease_seconds,
        )
        while self._asking.get(lessee) is call:
            changed = self._changed
            lease = await self._do(ask)
            if lease is not None and self._asking.get(lessee) is not call:
                await self._do(self.table.release, lease.id)
                self._notify()
                break
            if lease is not None:
                table = to_serialize(lease.table)
                return {"status": "OK", "lease": lease.id, "groups": lease.groups, "table": table}
            left = end - loop.time()
            try:
                await within(max(0.0, min(left, LOOK_SECONDS)), changed.wait())
            except TimeoutError:
                if left <= LOOK_SECONDS:
                    return {"status": "waiting", "why": await self._do(self.table.waiting_for, groups)}
        return {"status": "superseded"}

    async def _append(self, batches: list[pa.RecordBatch], done: list[asyncio.Future[list[str]]]) -> None:
        """Write batches as one segment; if that fails, each by itself, so that every writer gets its own answer."""
        try:
            accepted = set(await self._do(self._append_now, pa.concat_batches(batches)))
        except Exception as error:  # noqa: BLE001  (it goes to the writer that caused it)
            if len(batches) == 1:
                done[0].set_exception(error)
                return
            for batch, mine in zip(batches, done, strict=True):
                await self._append([batch], [mine])
            return
        for batch, mine in zip(batches, done, strict=True):
            names = set(batch["trajectory_id"].to_pylist())
            mine.set_result(sorted(names & accepted))
            accepted -= names
        self._notify()

    async def _sync(self) -> None:
        """Put partial responses on disk now and then, beside the table's thread: appends do not wait for it."""
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            try:
                await asyncio.to_thread(self.partials.sync)
            except LaminarError as error:
                log.warning("%s; only a loss of power would cost them", error)

    def _append_now(self, batch: pa.RecordBatch) -> list[str]:
        accepted = self.table.append(batch)
        self.partials.drop(batch["trajectory_id"].to_pylist())
        return accepted

    def _notify(self) -> None:
        """Let those who wait for groups look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _do(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work on the table's thread, after all that was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


def _journal(run_url: str) -> Path:
    """Where the partial pool's journal is: with the run if that is local, else on this host."""
    store = Store(run_url)
    if store.local:
        return Path(store.path("experience/partials.journal"))
    name = hashlib.blake2s(run_url.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"laminar-partials-{name}.journal"
