"""Parts of a version from several shards: each is proven before it counts, and hosts see whole versions only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laminar.errors import LaminarError
from laminar.weights.chain import Plan
from laminar.weights.layout import Layout
from laminar.weights.mapping import Segment
from laminar.weights.reader import WeightReader
from laminar.weights.shards import ShardPublisher, pack_shards
from tests.weights.relay_host import Host

NAMES = (("a", "b"), ("c",))
CHUNK = 1 << 16


def values(version: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((30_000 + ord(name),), version * 100 + ord(name), dtype=torch.int32) for name in names}


LAYOUT, SHARDS = pack_shards([Layout.of(values(0, *names), chunk_bytes=CHUNK).tensors for names in NAMES], CHUNK)


@pytest.fixture
def hosts(root: Path) -> Iterator[list[Host]]:
    """Two with a shard of the trainer, and one more."""
    made = [Host(root.parent / f"laminar-{index}") for index in range(3)]
    for each in made:
        each.owner.prepare(LAYOUT)
    yield made
    for each in made:
        each.node.close()
        each.owner.close()


def stage(host: Host, part: int, version: int) -> None:
    publisher = ShardPublisher(host.owner.root, SHARDS[part], deadline=1)
    publisher.publish(version, values(version, *NAMES[part]))
    publisher.close()


def send(hosts: list[Host], part: int, version: int) -> None:
    members = [hosts[part].member, *(host.member for host in hosts if host is not hosts[part])]
    shard = SHARDS[part]
    plan = Plan(version, version * 2 + part, tuple(members), CHUNK, shard.start, shard.stop, shard.part, shard.parts)
    hosts[part].node.send(plan)


def test_every_host_has_both_parts_of_each_version_and_none_before(hosts: list[Host]) -> None:
    for version in (1, 2, 3, 4):
        for part in (0, 1):
            stage(hosts[part], part, version)
            hosts[part].node.adopt(version, SHARDS[part])
        send(hosts, 0, version)
        hosts[0].said("done")
        assert {hosts[0].owner.head(), hosts[2].owner.head()} <= {None, version - 1}
        hosts[1].said("promoted")  # it has its own part and the other
        send(hosts, 1, version)
        for host in hosts:
            host.said("promoted")
            reader = WeightReader(host.owner.root)
            with reader.pull(verify=True) as pulled:
                wanted = values(version, "a", "b", "c")
                assert pulled.version == version
                assert all(torch.equal(pulled.tensors[name], wanted[name]) for name in wanted)
            reader.close()
        hosts[1].said("done")
        for host in hosts:
            host.reports.clear()


def test_a_part_that_is_damaged_or_not_there_is_said_so_and_can_be_handed_over_again(hosts: list[Host]) -> None:
    with pytest.raises(LookupError, match="part 0 of version 1 is not staged"):
        hosts[0].node.adopt(1, SHARDS[0])
    stage(hosts[0], 0, 1)
    segment = Segment(hosts[0].owner.root, writable=True)
    (slot,) = [slot for slot in segment.slots if slot.stamp]
    slot.payload[SHARDS[0].start + 5] ^= 1
    with pytest.raises(LaminarError, match=r"part 0 of version 1 in .* does not match its checksums; publish it again"):
        hosts[0].node.adopt(1, SHARDS[0])
    stage(hosts[0], 0, 1)
    hosts[0].node.adopt(1, SHARDS[0])
    hosts[0].node.adopt(1, SHARDS[0])  # twice is once


def test_a_version_whose_other_part_never_comes_gives_its_slot_to_a_newer_one(hosts: list[Host]) -> None:
    for version in range(1, 9):
        stage(hosts[0], 0, version)
        hosts[0].node.adopt(version, SHARDS[0])
    stage(hosts[1], 1, 8)
    hosts[1].node.adopt(8, SHARDS[1])
    send(hosts, 0, 8)
    send(hosts, 1, 8)
    for host in hosts:
        host.said("promoted")
        assert host.owner.held() == [8]


def test_tensors_of_another_shard_are_refused(hosts: list[Host]) -> None:
    publisher = ShardPublisher(hosts[0].owner.root, SHARDS[0])
    with pytest.raises(LaminarError, match="tensor a is missing"):
        publisher.publish(1, values(1, *NAMES[1]))
    publisher.close()
