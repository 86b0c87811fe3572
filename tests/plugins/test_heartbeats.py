"""Plugins that come and go while a heartbeat is under way: Dask would close a worker whose metrics change then."""

from __future__ import annotations

import asyncio
from pathlib import Path

from distributed import Client, Scheduler, Worker

from laminar_dask._compat import add_metric
from laminar_dask.table import TablePlugin

LOCAL = {"host": "127.0.0.1", "dashboard": False}


def test_a_heartbeat_beside_which_a_plugin_comes_or_goes_does_not_end_the_worker(tmp_path: Path) -> None:
    asyncio.run(_scenario(TablePlugin(str(tmp_path))))


async def _scenario(plugin: TablePlugin) -> None:
    async with asyncio.timeout(60):
        async with (
            Scheduler(**LOCAL) as scheduler,
            Worker(scheduler.address, nthreads=1, resources={"data": 1}, **LOCAL) as worker,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            for step in (client.register_plugin(plugin), client.unregister_worker_plugin(plugin.name)):
                begun, go_on = asyncio.Event(), asyncio.Event()

                async def slow(worker: Worker, begun: asyncio.Event = begun, go_on: asyncio.Event = go_on) -> int:
                    begun.set()
                    await go_on.wait()
                    return 1

                add_metric(worker, "slow", slow)
                heartbeat = asyncio.create_task(worker.heartbeat())
                await begun.wait()
                await step
                go_on.set()
                await heartbeat
                assert worker.status.name == "running"
            assert list(scheduler.workers) == [worker.address]
