"""What a killed bench leaves in shared memory is gone at the next start, and what lives is left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from laminar.weights.layout import Layout, TensorSpec
from laminar.weights.owner import SegmentOwner
from laminar.weights.scratch import scratch
from laminar.weights.segment import sweep

LAYOUT = Layout.pack([TensorSpec("a", "int8", (64,), 64)])


def use_until_killed(ready) -> None:
    with scratch("bench-test") as folder:
        owner = SegmentOwner(folder / "laminar-host0")
        owner.prepare(LAYOUT)
        ready.send(folder)
        signal.pause()


def own_until_killed(root: Path, ready) -> None:
    owner = SegmentOwner(root)
    owner.prepare(LAYOUT)
    ready.send(root)
    signal.pause()


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(start) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    dead, alive = start(use_until_killed, there), start(use_until_killed, there)
    folders = {}
    for _ in range(2):
        assert here.poll(20), "a process did not start"
        folder = here.recv()
        folders[int(folder.name.split("-")[-2])] = folder
    os.kill(dead.pid, signal.SIGKILL)
    dead.join(20)
    sweep()
    assert not folders[dead.pid].exists()
    assert (folders[alive.pid] / "laminar-host0" / "slot0").exists()


def test_a_relay_that_outlives_its_bench_for_a_moment_keeps_its_memory(start) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    bench = start(use_until_killed, there)
    assert here.poll(20), "the bench did not start"
    folder = here.recv()
    relay = start(own_until_killed, folder / "laminar-host1", there)
    assert here.poll(20), "the relay did not start"
    here.recv()
    os.kill(bench.pid, signal.SIGKILL)
    bench.join(20)
    sweep()
    assert (folder / "laminar-host1" / "slot0").exists()
    os.kill(relay.pid, signal.SIGKILL)
    relay.join(20)
    with scratch("bench-test"):  # the next start
        assert not folder.exists()


def test_nothing_is_left_of_a_scratch_folder_that_ended_in_order() -> None:
    with scratch("bench-test") as folder:
        (folder / "file").write_bytes(bytes(4096))
    assert not folder.exists()
