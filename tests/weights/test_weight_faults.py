"""Real processes, real kills: nobody sees a torn version, nothing is stuck, nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from laminar.weights.layout import Layout
from laminar.weights.locks import holders
from laminar.weights.mapping import Segment
from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher
from laminar.weights.reader import WeightReader
from laminar.weights.segment import in_use, sweep
from tests.weights.segments import publisher_of

ELEMENTS = 1 << 17


def tensors(version: int) -> dict[str, torch.Tensor]:
    """1 MiB in two tensors, each element the version."""
    return {name: torch.full((ELEMENTS,), version, dtype=torch.int32) for name in ("a", "b")}


LAYOUT = Layout.of(tensors(0), chunk_bytes=64 << 10)
publish = publisher_of(tensors)


def read_until(root: Path, stop, verify: bool, results) -> None:
    reader, reads, torn, last, backwards = WeightReader(root), 0, 0, -1, 0
    while not stop.is_set():
        with reader.pull(verify=verify) as pulled:
            lowest = min(int(tensor.min()) for tensor in pulled.tensors.values())
            highest = max(int(tensor.max()) for tensor in pulled.tensors.values())
        torn += not lowest == highest == pulled.version
        backwards += pulled.version < last
        reads, last = reads + 1, pulled.version
    results.send((reads, torn, backwards))


def test_nobody_sees_a_torn_version_under_a_trainer_that_never_pauses(owner: SegmentOwner, start) -> None:
    publish(owner, 0)
    stop = multiprocessing.get_context("fork").Event()
    ends = []
    for verify in (True, False):
        here, there = multiprocessing.Pipe(duplex=False)
        start(read_until, owner.root, stop, verify, there)
        ends.append(here)
    publisher, version, until = Publisher(owner.root), 0, time.monotonic() + 2
    while time.monotonic() < until:
        version += 1
        publisher.publish(version, tensors(version))
        owner.promote(version)
    stop.set()
    for end in ends:
        assert end.poll(20), "a reader did not end"
        reads, torn, backwards = end.recv()
        assert reads > 10
        assert (torn, backwards) == (0, 0)
    assert version > 10


def test_a_reader_overtaken_by_every_slot_while_it_looks_still_finds_the_newest(
    owner: SegmentOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(owner, 1, 2, 3)
    reader, head, waiting = WeightReader(owner.root), Segment.head, [(4, 5, 6)]

    def overtaken_once(segment: Segment) -> tuple[int, int] | None:
        seen = head.fget(segment)
        if waiting:
            publish(owner, *waiting.pop())
        return seen

    monkeypatch.setattr(Segment, "head", property(overtaken_once, head.fset))
    with reader.pull() as pulled:
        assert pulled.version == 6


def pin_and_wait(root: Path, version: int, ready) -> None:
    with WeightReader(root).pull(version):
        ready.send(os.getpid())
        signal.pause()


def test_a_reader_killed_in_its_pin_frees_the_slot(owner: SegmentOwner, start) -> None:
    publish(owner, 1, 2, 3)
    here, there = multiprocessing.Pipe(duplex=False)
    readers = [start(pin_and_wait, owner.root, version, there) for version in (1, 2)]
    for _ in readers:
        assert here.poll(20), "a reader did not get its pin"
        here.recv()
    with pytest.raises(TimeoutError, match=f"pinned by process {readers[0].pid}"):
        Publisher(owner.root, deadline=0.05).publish(4, tensors(4))
    os.kill(readers[0].pid, signal.SIGKILL)
    readers[0].join(20)
    Publisher(owner.root).publish(4, tensors(4))
    owner.promote(4)
    assert owner.held() == [2, 3, 4]


class Deadly(dict):
    """Tensors that kill the process that copies them, with half of them copied."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__(values)
        self.taken = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.taken += name == "b"
        if self.taken == 2:  # the first time only its device was looked at
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


def test_a_trainer_killed_in_its_copy_leaves_an_empty_slot_that_nobody_reads(owner: SegmentOwner, start) -> None:
    publish(owner, 1, 2, 3)

    trainer = start(lambda: Publisher(owner.root).publish(4, Deadly(tensors(4))))
    trainer.join(20)
    assert trainer.exitcode == -signal.SIGKILL
    reader = WeightReader(owner.root)
    assert reader.held() == [2, 3]
    with pytest.raises(LookupError, match="version 4 is not staged"):
        owner.promote(4)
    publish(owner, 4)
    assert reader.held() == [2, 3, 4]


def own_until_killed(root: Path, ready) -> None:
    owner = SegmentOwner(root)
    owner.prepare(LAYOUT)
    publish(owner, 5, 6)
    Publisher(root).publish(7, tensors(7))
    ready.send(owner.held())
    signal.pause()


def started_owner(root: Path, start):
    here, there = multiprocessing.Pipe(duplex=False)
    process = start(own_until_killed, root, there)
    assert here.poll(20), "the owner did not start"
    assert here.recv() == [5, 6]
    return process


def test_a_new_owner_takes_up_what_a_killed_one_left(root: Path, start) -> None:
    first = started_owner(root, start)
    reader, publisher = WeightReader(root), Publisher(root)
    with pytest.raises(TimeoutError, match=rf"owner.lock was held for 0.05 s by process {first.pid}"):
        SegmentOwner(root, deadline=0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.join(20)
    assert reader.held() == [5, 6]
    second = SegmentOwner(root)
    assert (second.head(), second.layout) == (6, LAYOUT)
    second.prepare(LAYOUT)
    second.promote(7)
    publisher.publish(8, tensors(8))
    second.promote(8)
    assert reader.held() == [6, 7, 8]
    second.close()
    assert not root.exists()


def test_a_sweep_removes_dead_runs_and_no_live_one(root: Path, start) -> None:
    folder = root.parent
    live = SegmentOwner(folder / "laminar-live")
    first = started_owner(root, start)
    reader = WeightReader(root)
    assert reader.newest() == 6
    (folder / "laminar-half-made").mkdir()
    (folder / "laminar-of-somebody-else").mkdir()
    (folder / "laminar-of-somebody-else" / "file").touch()
    assert sweep(folder) == ["laminar-half-made"]
    os.kill(first.pid, signal.SIGKILL)
    first.join(20)
    assert sweep(folder) == []  # a replica is attached: the relay may come back
    reader.close()
    assert sweep(folder) == ["laminar-run"]
    assert sorted(path.name for path in folder.iterdir()) == ["laminar-live", "laminar-of-somebody-else"]
    live.close()


def test_a_lock_is_free_once_released_although_a_forked_child_has_the_descriptor(owner: SegmentOwner, start) -> None:
    publish(owner, 1, 2, 3)
    reader = WeightReader(owner.root)
    with reader.pull(1), reader.pull(2):
        start(signal.pause)
    assert holders(owner.root / "slot0") == holders(owner.root / "slot1") == []
    Publisher(owner.root, deadline=0.05).publish(4, tensors(4))


def test_a_folder_is_in_use_while_its_relay_lives(root: Path) -> None:
    assert not in_use(root)
    owner = SegmentOwner(root)
    assert in_use(root)
    owner.close()
    assert not in_use(root)
