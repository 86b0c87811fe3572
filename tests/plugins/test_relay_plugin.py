"""The relay as Dask runs it: RPCs, its own role only, no torch, a graceful end and a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from distributed import Client, Nanny, Scheduler, Worker

from laminar.errors import LaminarError
from laminar.weights.layout import Layout
from laminar.weights.publisher import Publisher
from laminar.weights.reader import WeightReader
from laminar.weights.segment import remove_segments, segment_root
from laminar_dask.relay import RelayPlugin, announce, prepare

LOCAL = {"host": "127.0.0.1", "dashboard": False}


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), float(version)), "b": torch.full((3,), version, dtype=torch.int64)}


LAYOUT = Layout.of(tensors(0))


@pytest.fixture
def run() -> Iterator[str]:
    run = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield run
    remove_segments(segment_root(run))


@asynccontextmanager
async def cluster(run: str, relay_class: type[Worker] | type[Nanny]) -> AsyncIterator[tuple[Any, Worker, Client]]:
    """A scheduler, one relay, one worker in this process to call from, and the plugin on all of them."""
    async with Scheduler(**LOCAL) as scheduler:
        async with (
            relay_class(scheduler.address, nthreads=1, resources={"relay": 1}, name="relay", **LOCAL) as relay,
            Worker(scheduler.address, nthreads=1, resources={"trainer": 1}, name="trainer", **LOCAL) as trainer,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            await client.register_plugin(RelayPlugin(run))
            yield relay, trainer, client


async def until(what: str, condition: Callable[[], Awaitable[Any]], deadline: float = 30.0) -> Any:
    """Poll for a value that is not None; fail by name after the deadline, in seconds."""
    end = time.monotonic() + deadline
    while (value := await condition()) is None:
        assert time.monotonic() < end, f"waited {deadline:g} s for {what}"
        await asyncio.sleep(0.02)
    return value


def test_a_version_goes_from_the_trainer_through_the_relay_to_a_reader(run: str) -> None:
    async def scenario() -> None:
        async with cluster(run, Worker) as (relay, trainer, _):
            for _ in range(2):  # twice is once
                status = await prepare(trainer, relay.address, LAYOUT)
                assert (status["version"], status["layout"]) == (None, LAYOUT.hash)
            publisher, reader = Publisher(segment_root(run)), WeightReader(segment_root(run))
            for version in (0, 1):
                staged = publisher.publish(version, tensors(version))
                answer = await announce(trainer, relay.address, version)
                assert (answer["status"], answer["version"]) == ("published", version)
                assert answer["digest"] == staged.digest
            with reader.pull() as pulled:
                assert (pulled.version, pulled.tensors["b"].tolist()) == (1, [1, 1, 1])
            metrics = (await relay.get_metrics())["laminar_relay"]
            assert (metrics["version"], metrics["held"]) == (1, [0, 1])
            assert metrics["bytes"] > 3 * LAYOUT.nbytes
            status = await trainer.rpc(relay.address).laminar_relay_status()
            assert (status["version"], list(status["held"])) == (1, [0, 1])
        assert not segment_root(run).exists()

    asyncio.run(scenario())


def test_only_a_worker_of_the_relay_role_becomes_a_relay(run: str) -> None:
    async def scenario() -> None:
        async with cluster(run, Worker) as (relay, trainer, client):
            assert "laminar_relay_status" in relay.handlers
            stand_in = {"laminar_relay_can_stand_in", "laminar_relay_stand_in"}
            assert {name for name in trainer.handlers if name.startswith("laminar_relay")} == stand_in
            assert "laminar_relay" not in trainer.metrics
            await client.unregister_worker_plugin("laminar-relay")
            assert "laminar_relay_status" not in relay.handlers
            assert not segment_root(run).exists()

    asyncio.run(scenario())


def test_what_a_relay_refuses_reaches_the_trainer_as_it_was_said(run: str) -> None:
    async def scenario() -> None:
        async with cluster(run, Worker) as (relay, trainer, _):
            with pytest.raises(LaminarError, match="no layout was prepared"):
                await announce(trainer, relay.address, 1)
            await prepare(trainer, relay.address, LAYOUT)
            with pytest.raises(LookupError, match="version 1 is not staged"):
                await announce(trainer, relay.address, 1)
            with pytest.raises(LaminarError, match="holds layout"):
                await prepare(trainer, relay.address, Layout.of({"a": torch.zeros(1)}))

    asyncio.run(scenario())


def test_a_relay_that_does_not_answer_is_named_with_the_deadline(run: str) -> None:
    async def never(version: int) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with cluster(run, Worker) as (relay, trainer, _):
            relay.handlers["laminar_relay_published"] = never
            message = f"relay {relay.address} did not publish version 7 within 0.1 s"
            with pytest.raises(LaminarError, match=message):
                await announce(trainer, relay.address, 7, deadline=0.1)
            nobody = "tcp://127.0.0.1:1"
            with pytest.raises(LaminarError, match=f"relay {nobody} (could|did) not publish version 7"):
                await announce(trainer, nobody, 7, deadline=1)

    asyncio.run(scenario())


async def come_back(nanny: Nanny, killed: str, trainer: Worker) -> dict[str, Any]:
    """Wait for a killed relay to be there again; its status."""

    async def restarted() -> dict[str, Any] | None:
        if nanny.worker_address in (None, killed):
            return None
        try:
            return await trainer.rpc(nanny.worker_address).laminar_relay_status()
        except OSError:
            return None  # registered, but its plugin is not yet set up

    return dict(await until("the relay to come back", restarted))


def test_a_relay_restarted_after_kill_9_serves_the_versions_it_had(run: str) -> None:
    async def scenario() -> None:
        async with cluster(run, Nanny) as (nanny, trainer, _):
            await prepare(trainer, nanny.worker_address, LAYOUT)
            publisher, reader = Publisher(segment_root(run)), WeightReader(segment_root(run))
            publisher.publish(4, tensors(4))
            await announce(trainer, nanny.worker_address, 4)
            killed, process = nanny.worker_address, nanny.process.pid
            os.kill(process, signal.SIGKILL)
            publisher.publish(5, tensors(5))  # nobody there: the files are enough

            status = await come_back(nanny, killed, trainer)
            assert (status["version"], list(status["held"])) == (4, [4])
            assert reader.held() == [4]
            await announce(trainer, nanny.worker_address, 5)
            with reader.pull() as pulled:
                assert (pulled.version, pulled.tensors["a"][0].item()) == (5, 5.0)
        assert not segment_root(run).exists()

    asyncio.run(scenario())


def test_a_relay_that_finds_its_memory_damaged_starts_with_none_and_what_is_mapped_stays_served(run: str) -> None:
    async def scenario() -> None:
        async with cluster(run, Nanny) as (nanny, trainer, _):
            await prepare(trainer, nanny.worker_address, LAYOUT)
            publisher, reader = Publisher(segment_root(run)), WeightReader(segment_root(run))
            publisher.publish(4, tensors(4))
            await announce(trainer, nanny.worker_address, 4)
            with reader.pull() as pulled:
                (empty,) = [slot for slot in segment_root(run).glob("slot*") if slot.name == "slot2"]
                killed, process = nanny.worker_address, nanny.process.pid
                os.truncate(empty, 100)
                os.kill(process, signal.SIGKILL)
                status = await come_back(nanny, killed, trainer)
                assert (status["version"], list(status["held"])) == (None, [])
                assert pulled.tensors["a"][0].item() == 4.0
            await prepare(trainer, nanny.worker_address, LAYOUT)
            publisher.publish(5, tensors(5))
            await announce(trainer, nanny.worker_address, 5)
            with reader.pull() as pulled:
                assert (pulled.version, pulled.tensors["a"][0].item()) == (5, 5.0)

    asyncio.run(scenario())


def test_the_relay_does_not_load_torch() -> None:
    code = "import sys, laminar_dask.relay, laminar.weights.reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
