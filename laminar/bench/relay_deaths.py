"""How long a relay's successors wait for bytes when it is killed in the middle of a transfer."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from math import ceil
from statistics import median
from typing import Any

from laminar.bench import say
from laminar.bench.relay_chains import prepare, served
from laminar.bench.relays import bytes_layout, relay_processes
from laminar.weights.chain import Plan

__all__ = ["measure_repair", "p95"]

SIZE = 512 << 20
CHUNK = 1 << 20
RELAYS = 5


def measure_repair(transport: str, kills: int, namespace: str | None) -> dict[str, Any]:
    """``repair_ms_median`` and ``repair_ms_p95``: from a kill -9 in the middle to new bytes behind the dead relay."""
    took: list[float] = []
    tries = 0
    while len(took) < kills:
        if tries > 2 * kills:
            raise RuntimeError(f"of {tries} transfers only {len(took)} were still under way when a relay was killed")
        victim = 1 + tries % (RELAYS - 2)
        waited = _one_kill(transport, victim, namespace)
        tries += 1
        if waited is not None:
            took.append(waited * 1000)
            say(f"    relay {victim} killed: {took[-1]:.0f} ms")
    return {"repair_ms_median": median(took), "repair_ms_p95": p95(took), "repair_ms": [round(ms, 1) for ms in took]}


def _one_kill(transport: str, victim: int, namespace: str | None) -> float | None:
    """Seconds from the kill to the first new bytes at the successor; None if that one had everything already."""
    spaces = [namespace] * RELAYS
    with relay_processes(RELAYS, transport, namespaces=spaces, progress_deadline=10.0) as (relays, members):
        prepare(relays, bytes_layout(SIZE))
        digest = relays[0].call("publish", 1)
        relays[0].call("send", Plan(1, 1, tuple(members), CHUNK, 0, SIZE))
        relays[-1].wait_for("fed")
        killed = relays[victim].signal(signal.SIGKILL)
        living = [relay for index, relay in enumerate(relays[1:], 1) if index != victim]
        served(living, 1)
        if {relay.call("proven", 1) for relay in living} != {digest}:
            raise RuntimeError(f"after a kill of relay {victim} by {transport} a survivor holds other bytes")
        fed = [it.at for it in relays[victim + 1].reports if it.what == "fed" and it.at > killed]
        return fed[0] - killed if fed else None


def p95(values: Sequence[float]) -> float:
    """The 95th percentile by nearest rank.

    Example
    -------
    >>> p95(range(1, 21))
    19
    """
    return sorted(values)[ceil(0.95 * len(values)) - 1]
