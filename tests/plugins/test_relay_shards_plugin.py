"""A trainer of two shards, each a process on its own host with half the tensors: every host gets whole versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from distributed import Client, Nanny

from laminar.weights.layout import Layout
from laminar.weights.reader import WeightReader
from laminar.weights.segment import remove_segments, segment_root
from laminar.weights.shards import pack_shards
from tests.plugins.relay_fleet import HOSTS, LOCAL, fleet, new_run, until

NAMES = (("a", "b"), ("c", "d"))
ELEMENTS = 3 << 20


def values(version: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.full((ELEMENTS,), version * 10 + ord(name), dtype=torch.int32) for name in names}


LAYOUT, SHARDS = pack_shards([Layout.of(values(0, names)).tensors for names in NAMES])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LAMINAR_HOST", "a")
    run = new_run()
    yield run
    for host in HOSTS:
        remove_segments(segment_root(run, host))


def test_two_shards_hand_over_a_half_each_and_every_host_reads_whole_versions(run: str) -> None:
    async def hand_over(part: int, version: int) -> None:
        from distributed import get_worker

        from laminar.weights.segment import segment_root
        from laminar.weights.shards import ShardPublisher
        from laminar_dask.relay import announce, prepare

        worker, shard = get_worker(), SHARDS[part]
        await prepare(worker, "", LAYOUT)
        publisher = ShardPublisher(segment_root(run), shard)
        tensors = {n: torch.full((ELEMENTS,), version * 10 + ord(n), dtype=torch.int32) for n in NAMES[part]}
        await asyncio.to_thread(publisher.publish, version, tensors)
        publisher.close()
        answer = await announce(worker, "", version, shard=shard)
        assert answer["status"] == "handed over"

    async def scenario() -> None:
        async with fleet(run, "a", "b", "c", layout=LAYOUT) as cluster:
            for part, host in enumerate("ab"):
                shard = Nanny(
                    cluster.scheduler.address,
                    nthreads=1,
                    resources={f"shard-{part}": 1, "trainer": 1},
                    env={"LAMINAR_HOST": host},
                    name=f"shard-{part}",
                    **LOCAL,
                )
                await cluster.stack.enter_async_context(shard)
            client = await cluster.stack.enter_async_context(
                Client(cluster.scheduler.address, asynchronous=True, set_as_default=False)
            )
            for version in (1, 2, 3):
                handed_over = [
                    client.submit(hand_over, part, version, resources={f"shard-{part}": 1}, pure=False)
                    for part in (1, 0)
                ]
                await asyncio.wait_for(client.gather(handed_over), 60)
                await everybody_reads(version)

    async def everybody_reads(version: int) -> None:
        for host in "abc":
            reader = WeightReader(segment_root(run, host))

            async def newest(reader: WeightReader = reader) -> bool | None:
                return True if reader.newest() == version else None

            await until(f"version {version} on host {host}", newest)
            with reader.pull() as pulled:
                wanted = values(version, NAMES[0] + NAMES[1])
                assert pulled.tensors.keys() == wanted.keys()
                assert all(torch.equal(pulled.tensors[name], wanted[name]) for name in wanted)
            reader.close()

    asyncio.run(scenario())
