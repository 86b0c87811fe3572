"""Several relays under one scheduler: versions reach all of them, whoever dies or joins meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from laminar.weights.chain import Member, Plan
from laminar.weights.forward import Report
from laminar.weights.layout import Layout
from laminar.weights.node import RelayNode
from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher
from laminar.weights.segment import remove_segments, segment_root
from laminar.weights.tcp import Tcp
from tests.plugins.relay_fleet import HOSTS, fleet, new_run, tensors, until


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


def test_what_each_relay_holds_moved_and_repaired_is_in_the_metrics(run: str) -> None:
    async def scenario() -> None:
        async with fleet(run, "a", "b", "c") as cluster:
            await cluster.publish(0)
            await cluster.everybody_has(0, ("a", "b", "c"))
            await cluster.publish(1)
            await cluster.everybody_has(1, ("a", "b", "c"))

            async def rows() -> dict[str, dict[str, Any]] | None:
                found = {row["name"]: row for row in await cluster.trainer.scheduler.laminar_chain_rows()}
                up = len(found) == 3 and all(row["version"] == 1 for row in found.values())
                return found if up else None

            found = await until("heartbeats with version 1", rows)
            order = sorted(found, key=lambda name: found[name]["position"])
            assert order == ["relay-a", "relay-b", "relay-c"]
            first, second, last = (found[name] for name in order)
            assert (first["bytes_in"], last["bytes_out"]) == (0, 0)
            assert first["bytes_out"] == second["bytes_in"] == second["bytes_out"] == last["bytes_in"] > 0
            for row in found.values():
                assert (row["held"], row["lag"], row["repairs"], row["transport"]) == (2, 0, 0, "tcp")

    asyncio.run(scenario())


def test_a_stranger_who_knows_where_a_relay_listens_cannot_send_to_it(run: str) -> None:
    async def scenario() -> None:
        async with fleet(run, "a", "b") as cluster:
            await cluster.publish(0)
            await cluster.everybody_has(0, ("a", "b"))
            members = cluster.scheduler.plugins["laminar-chain"].keeper.members.values()
            relay = next(member for member in members if member.host == "b")
            said: list[Report] = []
            owner = SegmentOwner(segment_root(run, "d"))
            stranger = RelayNode(owner, Tcp(), run=run, report=said.append)
            try:
                owner.prepare(Layout.of(tensors(0)))
                Publisher(owner.root).publish(5, tensors(5))
                owner.promote(5)
                chain = (Member("stranger", "d", stranger.address), relay)
                stranger.send(Plan(5, 99, chain, 1 << 18, 0, owner.layout.nbytes))

                async def refused() -> bool | None:
                    return True if any("does not know the token" in report.why for report in said) else None

                await until("a refusal", refused)
            finally:
                stranger.close()
                owner.close()
            await cluster.publish(1)
            await cluster.everybody_has(1, ("a", "b"))

    asyncio.run(scenario())
