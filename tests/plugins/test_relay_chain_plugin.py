"""Several relays under one scheduler: versions reach all of them, whoever dies or joins meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from laminar.weights.segment import remove_segments, segment_root
from tests.plugins.relay_fleet import HOSTS, fleet, new_run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LAMINAR_HOST", "a")  # this process is the trainer's
    run = new_run()
    yield run
    for host in HOSTS:
        remove_segments(segment_root(run, host))


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
