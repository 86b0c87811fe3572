"""Versions down chains of relays: on one machine at full speed, and over links of 1 Gbit/s between emulated hosts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from laminar.bench import say
from laminar.bench.hosts import PAYLOAD_SHARE, emulated_hosts, loopback
from laminar.bench.relay_memory import copy_rate, fits
from laminar.bench.relays import RelayProcess, bytes_layout, chain_of, relay_processes
from laminar.weights.chain import Member
from laminar.weights.layout import Layout

__all__ = ["LINK_DEADLINE", "LINK_MEGABITS", "SLOTS", "carry", "measure_chain", "measure_links", "prepare", "served"]

GIB = 1 << 30
HOPS = (1, 2, 4, 8)
LINK_BYTES = 128 << 20
LINK_MEGABITS = 1000
LINK_DEADLINE = 30.0
"""Progress deadline on shared, slow links: eight flows at once may leave one waiting for seconds."""
SLOTS = 2
"""A relay of the bench holds the version before and the one that comes."""


def measure_chain(transport: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """``chain_seconds`` for each number of relays, CPU seconds a GiB and hop, and the rate against memory's."""
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    size = fits(nbytes, SLOTS * (HOPS[-1] + 1))
    versions = itertools.count(1)
    with loopback() as lo, relay_processes(HOPS[-1] + 1, transport, namespace=lo) as (relays, members):
        prepare(relays, bytes_layout(size))
        for hops in HOPS:
            say(f"    {hops} hops of {size >> 20} MiB")
            chain = relays[: hops + 1], members[: hops + 1]
            runs = [carry(*chain, next(versions), size) for _ in range(repeats + 1)][1:]
            seconds[str(hops)] = median(run[0] for run in runs)
            cpu[str(hops)] = median(run[1] for run in runs) / (size / GIB * hops)
    copy = copy_rate(fits(nbytes, 2))
    return {
        "chain_seconds": seconds,
        "chain_bytes": size,
        "chain_cpu_seconds_per_gib_hop": max(cpu.values()),
        "chain_cpu_seconds_by_hops": cpu,
        "chain_rate_over_copy": HOPS[-1] * size / seconds[str(HOPS[-1])] / copy,
        "copy_bytes_per_second": copy,
    }


def measure_links(transport: str, repeats: int) -> dict[str, Any]:
    """``chain_growth``, ``star_over_chain`` and ``link_ratio`` over links of 1 Gbit/s."""
    hops = HOPS[-1]
    with emulated_hosts(hops + 1, LINK_MEGABITS) as hosts:
        with relay_processes(
            hops + 1, transport, hosts=hosts.addresses, namespaces=hosts.namespaces, progress_deadline=LINK_DEADLINE
        ) as (relays, members):
            prepare(relays, bytes_layout(LINK_BYTES))
            runs = range(1, repeats + 2)
            one = median([carry(relays[:2], members[:2], version, LINK_BYTES)[0] for version in runs][1:])
            runs = range(runs.stop, runs.stop + repeats + 1)
            all_ = median([carry(relays, members, version, LINK_BYTES)[0] for version in runs][1:])
            star = _star(relays, members, runs.stop)
    allowed = LINK_MEGABITS * 1e6 / 8 * PAYLOAD_SHARE
    return {
        "chain_growth": all_ / one,
        "star_over_chain": star / all_,
        "link_ratio": LINK_BYTES / one / allowed,
        "link_seconds": {"1": one, str(hops): all_, "star": star},
    }


def carry(relays: Sequence[RelayProcess], members: Sequence[Member], version: int, size: int) -> tuple[float, float]:
    """One version down the chain: seconds until the last relay can serve it, and CPU seconds of all."""
    relays[0].call("publish", version)
    before = sum(relay.call("cpu") for relay in relays)
    began = relays[0].call("send", chain_of(members, version, size, epoch=version))
    seconds = served(relays[1:], version) - began
    relays[0].wait_for("done", where=lambda report: report.version == version)
    return seconds, sum(relay.call("cpu") for relay in relays) - before


def served(relays: Sequence[RelayProcess], version: int) -> float:
    """When the last of them could serve a version (unix seconds)."""
    return max(relay.wait_for("promoted", where=lambda it: it.version == version).at for relay in relays)


def prepare(relays: Sequence[RelayProcess], layout: Layout) -> None:
    """Have relays take their memory."""
    for relay in relays:
        relay.call("prepare", layout, SLOTS)


def _star(relays: Sequence[RelayProcess], members: Sequence[Member], version: int) -> float:
    """The first relay sends to every other one by itself: seconds until the last can serve."""
    root = relays[0]
    root.call("publish", version)
    began = time.time()
    for index, member in enumerate(members[1:]):
        plan = chain_of([members[0], member], version, LINK_BYTES, epoch=1000 + index, chunk=1 << 20)
        root.call("stand_in", root.setting.root, plan)
    return served(relays[1:], version) - began
