"""Versions down chains of relays: on one machine at full speed, and over links of 1 Gbit/s between emulated hosts.

What is compared is measured in turns, so that a slow spell of the machine falls on all of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from laminar.bench import say
from laminar.bench.hosts import PAYLOAD_SHARE, emulated_hosts
from laminar.bench.relay_memory import fits, plain_copy
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
COPY_BYTES = 512 << 20
"""Far beyond every cache, and little beside the relays' memory."""
COPIES = 5
"""In each turn. The first one counts, as one chain of each length does; the best of all is told beside it."""
SLOTS = 2
"""A relay of the bench holds the version before and the one that comes."""


def measure_chain(transport: str, nbytes: int, repeats: int, namespace: str | None) -> dict[str, Any]:
    """``chain_seconds`` for each number of relays, CPU seconds a GiB and hop, and the rate against memory's.

    CPU seconds are those of all the chains over all that they carried, and by the number of hops too: one hop by UCX
    has sender and receiver each on a core of its own, and where these share no cache (a hypervisor moves virtual ones
    about) it takes two to three times as much: each line of the kernel's buffers goes back and forth. Hosts share none.
    """
    count = HOPS[-1] + 1
    runs: dict[int, list[tuple[float, float]]] = {hops: [] for hops in HOPS}
    copies: list[list[float]] = []
    versions = itertools.count(1)
    with plain_copy(COPY_BYTES) as copy:
        size = fits(nbytes, SLOTS * count)
        with relay_processes(count, transport, namespaces=[namespace] * count) as (relays, members):
            prepare(relays, bytes_layout(size))
            for turn in range(repeats + 1):  # the first one warms up
                say(f"    {size >> 20} MiB down {', '.join(map(str, HOPS))} hops, turn {turn} of {repeats}")
                for hops in HOPS:
                    runs[hops].append(carry(relays[: hops + 1], members[: hops + 1], next(versions), size))
                copies.append([copy() for _ in range(COPIES)])
    seconds = {str(hops): median(took for took, _ in runs[hops][1:]) for hops in HOPS}
    cpu = {hops: median(used for _, used in runs[hops][1:]) / (size / GIB) for hops in HOPS}
    rates = [HOPS[-1] * size / took for took, _ in runs[HOPS[-1]]]
    return {
        "chain_seconds": seconds,
        "chain_bytes": size,
        "chain_cpu_seconds_per_gib_hop": sum(cpu.values()) / sum(HOPS),
        "chain_cpu_seconds_by_hops": {str(hops): used / hops for hops, used in cpu.items()},
        "chain_rate_over_copy": median(rate / turn[0] for rate, turn in list(zip(rates, copies, strict=True))[1:]),
        "copy_bytes_per_second": median(turn[0] for turn in copies[1:]),
        "copy_bytes_per_second_best": max(itertools.chain.from_iterable(copies)),
    }


def measure_links(transport: str, repeats: int) -> dict[str, Any]:
    """``chain_growth``, ``star_over_chain`` and ``link_ratio`` over links of 1 Gbit/s."""
    hops = HOPS[-1]
    versions = itertools.count(1)
    turns: list[tuple[float, float]] = []
    with emulated_hosts(hops + 1, LINK_MEGABITS) as hosts:
        with relay_processes(
            hops + 1, transport, hosts=hosts.addresses, namespaces=hosts.namespaces, progress_deadline=LINK_DEADLINE
        ) as (relays, members):
            prepare(relays, bytes_layout(LINK_BYTES))
            for _ in range(repeats + 1):
                first, _ = carry(relays[:2], members[:2], next(versions), LINK_BYTES)
                turns.append((first, carry(relays, members, next(versions), LINK_BYTES)[0]))
            star = _star(relays, members, next(versions))
    one, all_ = (median(column) for column in zip(*turns[1:], strict=True))
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
