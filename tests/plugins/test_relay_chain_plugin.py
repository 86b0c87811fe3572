"""Several relays under one scheduler: versions reach all of them, whoever dies or joins meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from distributed import Client, Nanny, Scheduler, Worker

from laminar.weights.layout import Layout
from laminar.weights.publisher import Publisher
from laminar.weights.reader import WeightReader
from laminar.weights.segment import remove_segments, segment_root
from laminar_dask.relay import RelayPlugin, announce, prepare
from laminar_dask.relay_chain import ChainPlugin

LOCAL = {"host": "127.0.0.1", "dashboard": False}
HOSTS = ("a", "b", "c", "d")


def tensors(version: int, elements: int = 1 << 18) -> dict[str, torch.Tensor]:
    return {"a": torch.full((elements,), float(version)), "b": torch.full((3,), version, dtype=torch.int64)}


@dataclass
class Fleet:
    scheduler: Scheduler
    trainer: Worker
    relays: dict[str, Nanny]
    run: str
    stack: AsyncExitStack

    async def add(self, host: str) -> None:
        """A relay on an emulated host of its own."""
        nanny = Nanny(
            self.scheduler.address,
            nthreads=1,
            resources={"relay": 1},
            env={"LAMINAR_HOST": host},
            name=f"relay-{host}",
            **LOCAL,
        )
        self.relays[host] = await self.stack.enter_async_context(nanny)

    async def publish(self, version: int, elements: int = 1 << 18) -> None:
        publisher = Publisher(segment_root(self.run, "a"))
        await asyncio.to_thread(publisher.publish, version, tensors(version, elements))
        await announce(self.trainer, "tcp://127.0.0.1:1", version, deadline=30)

    async def everybody_has(self, version: int, hosts: tuple[str, ...]) -> None:
        """Wait until replicas of every host can read a version, and look at what they would read."""

        async def all_have() -> bool | None:
            newest = {host: WeightReader(segment_root(self.run, host)).newest() for host in hosts}
            return True if set(newest.values()) == {version} else None

        await until(f"version {version} on {hosts}", all_have)
        for host in hosts:
            with WeightReader(segment_root(self.run, host)).pull() as pulled:
                assert (pulled.version, pulled.tensors["b"].tolist()) == (version, [version] * 3)
                assert float(pulled.tensors["a"].min()) == float(pulled.tensors["a"].max()) == version


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LAMINAR_HOST", "a")  # this process is the trainer's
    run = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield run
    for host in HOSTS:
        remove_segments(segment_root(run, host))


@asynccontextmanager
async def fleet(run: str, *hosts: str, elements: int = 1 << 18) -> AsyncIterator[Fleet]:
    """A scheduler, relays in processes of their own, and a trainer's worker on host a in this one."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(**LOCAL))
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True, set_as_default=False))
        await client.register_plugin(ChainPlugin())
        await client.register_plugin(RelayPlugin(run, "tcp"))
        trainer = await stack.enter_async_context(
            Worker(scheduler.address, nthreads=1, resources={"trainer": 1}, name="trainer", **LOCAL)
        )
        fleet = Fleet(scheduler, trainer, {}, run, stack)
        await asyncio.gather(*(fleet.add(host) for host in hosts))
        await prepare(trainer, "tcp://127.0.0.1:1", Layout.of(tensors(0, elements)))
        yield fleet


async def until(what: str, condition: Callable[[], Awaitable[Any]], deadline: float = 40.0) -> Any:
    end = time.monotonic() + deadline
    while (value := await condition()) is None:
        assert time.monotonic() < end, f"waited {deadline:g} s for {what}"
        await asyncio.sleep(0.02)
    return value


def test_versions_reach_every_host_and_a_late_joiner_is_served_by_a_relay(run: str) -> None:
    async def scenario() -> None:
        async with fleet(run, "a", "b", "c") as cluster:
            for version in (0, 1, 2):
                await cluster.publish(version)
            await cluster.everybody_has(2, ("a", "b", "c"))
            await cluster.add("d")
            await cluster.everybody_has(2, HOSTS)
            status = await cluster.trainer.scheduler.laminar_chain_status()
            assert len(status["relays"]) == 4
            assert status["newest"] == 2
            relay = cluster.relays["b"].worker_address
            seen = await cluster.trainer.rpc(relay).laminar_relay_status()
            assert (seen["version"], seen["lag"], seen["transport"]) == (2, 0, "tcp")
            assert seen["bytes_in"] > 0
            assert seen["position"] in (0, 1, 2)  # 0 if it served the joiner

    asyncio.run(scenario())


def test_when_a_relay_is_killed_versions_go_on_and_it_catches_up_when_it_is_back(run: str) -> None:
    async def scenario() -> None:
        async with fleet(run, "a", "b", "c") as cluster:
            await cluster.publish(0)
            await cluster.everybody_has(0, ("a", "b", "c"))
            os.kill(cluster.relays["b"].process.pid, signal.SIGKILL)
            await cluster.publish(1)
            await cluster.everybody_has(1, ("a", "b", "c"))
            await cluster.publish(2)
            await cluster.everybody_has(2, ("a", "b", "c"))

    asyncio.run(scenario())


def test_when_the_master_is_killed_in_the_middle_the_others_get_the_rest(run: str) -> None:
    elements = 24 << 20

    async def scenario() -> None:
        async with fleet(run, "a", "b", "c", elements=elements) as cluster:
            await cluster.publish(0, elements)
            os.kill(cluster.relays["a"].process.pid, signal.SIGKILL)
            await cluster.everybody_has(0, ("b", "c"))

    asyncio.run(scenario())
