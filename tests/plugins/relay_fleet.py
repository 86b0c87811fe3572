"""Relays under one scheduler, each in a process and on an emulated host of its own; the trainer is in this one."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from distributed import Client, Nanny, Scheduler, Worker

from laminar.weights.layout import Layout
from laminar.weights.publisher import Publisher
from laminar.weights.reader import WeightReader
from laminar.weights.segment import segment_root
from laminar_dask.relay import RelayPlugin, announce, prepare
from laminar_dask.relay_chain import ChainPlugin

__all__ = ["HOSTS", "LOCAL", "Fleet", "fleet", "new_run", "tensors", "until"]

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


@asynccontextmanager
async def fleet(run: str, *hosts: str, elements: int = 1 << 18, layout: Layout | None = None) -> AsyncIterator[Fleet]:
    """A scheduler, relays, and a trainer's worker on host a."""
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
        await prepare(trainer, "tcp://127.0.0.1:1", layout or Layout.of(tensors(0, elements)))
        yield fleet


async def until(what: str, condition: Callable[[], Awaitable[Any]], deadline: float = 40.0) -> Any:
    end = time.monotonic() + deadline
    while (value := await condition()) is None:
        assert time.monotonic() < end, f"waited {deadline:g} s for {what}"
        await asyncio.sleep(0.02)
    return value


def new_run() -> str:
    """An id that no other test has."""
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
