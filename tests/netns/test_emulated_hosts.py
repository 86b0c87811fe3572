"""A chain over rate-limited links between network namespaces: the number of hosts hardly matters."""

from __future__ import annotations

import subprocess

import pytest

from laminar.bench.hosts import PAYLOAD_SHARE, emulated_hosts, why_not
from laminar.bench.relays import bytes_layout, chain_of, relay_processes
from laminar.weights.transport import installed

SIZE = 32 << 20
MEGABITS = 500


@pytest.mark.parametrize("transport", installed())
def test_a_chain_of_four_hosts_is_hardly_slower_than_one_hop_and_uses_the_link(transport: str) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with emulated_hosts(5, MEGABITS) as hosts:
        with relay_processes(
            5, transport, hosts=hosts.addresses, namespaces=hosts.namespaces, progress_deadline=10.0
        ) as (relays, members):
            for relay in relays:
                relay.call("prepare", bytes_layout(SIZE))
            took: dict[int, float] = {}
            for version, hops in enumerate((1, 4) * 4):  # the best of each: others use the machine too
                digest = relays[0].call("publish", version)
                plan = chain_of(members[: hops + 1], version, SIZE, epoch=version, chunk=256 << 10)
                began = relays[0].call("send", plan)
                ended = relays[hops].wait_for("promoted", where=lambda it, v=version: it.version == v).at
                took[hops] = min(ended - began, took.get(hops, ended - began))
                assert relays[hops].call("proven", version) == digest
    assert took[4] < 1.5 * took[1], took
    assert SIZE / took[1] > 0.6 * MEGABITS * 1e6 / 8 * PAYLOAD_SHARE, took


def test_nothing_is_left_of_the_hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with emulated_hosts(2, MEGABITS) as hosts:
        assert hosts.namespaces[0] in _namespaces()
    assert not set(hosts.namespaces) & set(_namespaces())


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]
