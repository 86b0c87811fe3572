"""A new version every 50 ms for a minute, relays and readers, some of which are killed: nobody sees a torn version."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from laminar.bench.relays import bytes_layout, chain_of, relay_processes
from laminar.weights.mapping import Segment
from laminar.weights.reader import WeightReader

SIZE = 8 << 20
SECONDS = float(os.environ.get("LAMINAR_STRESS_SECONDS", "60"))
EVERY = 0.05


def read(root: Path, locked: bool, results) -> None:
    """Hash what is read, twice, and report versions going backwards and hashes that differ."""
    reader, torn, reads, backwards, last = WeightReader(root), 0, 0, 0, -1
    segment = Segment(root, writable=False)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if locked:
            with reader.pin() as pinned:
                torn += _torn(pinned.slot.payload)
                version = pinned.version
        else:
            version, index = segment.head
            before = hashlib.blake2b(segment.slots[index].payload).digest()
            while segment.head[0] < version + 3 and time.monotonic() < until:
                time.sleep(0.001)  # a reader that takes its time: with three slots its own is filled again by now
            torn += hashlib.blake2b(segment.slots[index].payload).digest() != before
        backwards += version < last
        last, reads = version, reads + 1
    results.send((locked, reads, torn, backwards))


def _torn(payload: memoryview) -> bool:
    return hashlib.blake2b(payload).digest() != hashlib.blake2b(payload).digest()


@pytest.mark.slow
def test_nobody_sees_a_torn_version_while_new_ones_come_every_50_ms(start) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    with relay_processes(4, "tcp", progress_deadline=10.0) as (relays, members):
        for relay in relays:
            relay.call("prepare", bytes_layout(SIZE))
        relays[0].call("publish", 0)
        relays[0].call("send", chain_of(members, 0, SIZE))
        for relay in relays[1:]:
            relay.wait_for("promoted")
        roots = [relay.setting.root for relay in relays]
        used = sum(path.stat().st_blocks * 512 for root in roots for path in root.iterdir())
        readers = [start(read, roots[index % 4], True, there) for index in range(8)]
        start(read, roots[1], False, there)
        began, version = time.monotonic(), 0
        while time.monotonic() < began + SECONDS:
            version += 1
            relays[0].call("publish", version)
            relays[0].call("send", chain_of(members, version, SIZE, epoch=version))
            relays[3].wait_for("promoted", where=lambda it, v=version: it.version == v)
            for relay in relays:
                relay.call("status")  # takes its reports out of the pipe
                relay.reports.clear()
            if version in (20, 40):
                os.kill(readers[version // 20].pid, signal.SIGKILL)
            time.sleep(max(0.0, began + version * EVERY - time.monotonic()))
        found = []
        for _ in range(7):
            assert here.poll(30), "a reader did not end"
            found.append(here.recv())
        assert sum(path.stat().st_blocks * 512 for root in roots for path in root.iterdir()) <= used
    locked = [counts for kind, *counts in found if kind]
    unlocked = [counts for kind, *counts in found if not kind]
    assert len(locked) == 6
    assert all((torn, backwards) == (0, 0) and reads > 10 for reads, torn, backwards in locked), found
    assert unlocked[0][1] > 0, "the control without the lock saw no torn version: the test shows nothing"
    assert version > SECONDS
