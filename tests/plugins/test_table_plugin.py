"""The table's worker plugin on a real cluster: one data worker, one without the table, RPC between them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.protocol import to_serialize

from laminar.errors import LaminarError, UserError
from laminar.experience.evictors import equal_rewards
from laminar.experience.samplers import Rules, freshest
from laminar_dask.outbox import Outbox
from laminar_dask.roles import RolesPlugin
from laminar_dask.table import TablePlugin
from tests.experience.rows import batch, group, one
from tests.experience.stores import full_disk

DEADLINE = 20.0


@dataclass
class Cluster:
    """One data worker with the plugin, one other worker, and the RPC from this to that."""

    scheduler: Scheduler
    client: Client
    data: Worker
    other: Worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other.rpc(self.data.address), name)

    async def append(self, rows: Any) -> list[str]:
        return list((await self.laminar_append(batch=to_serialize(rows)))["accepted"])

    async def lease(self, groups: int = 1, *, deadline: float = DEADLINE, **more: Any) -> dict[str, Any]:
        asked = {"version": 0, "staleness_ceiling": None, "lessee": "trainer"} | more
        answer = await self.laminar_lease(groups=groups, deadline=deadline, **asked)
        return answer | {"groups": list(answer["groups"])} if "groups" in answer else answer

    async def somebody_waits(self) -> None:
        """Returns once a lease that was asked for is being waited for."""
        while (await self.laminar_counts())["lessees_waiting"] == 0:
            pass


def worker(scheduler: Scheduler, **options: Any) -> Worker:
    return Worker(scheduler.address, host="127.0.0.1", dashboard=False, nthreads=1, **options)


@asynccontextmanager
async def cluster(plugin: TablePlugin) -> AsyncIterator[Cluster]:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        async with worker(scheduler, resources={"data": 1}) as data, worker(scheduler) as other:
            async with Client(scheduler.address, asynchronous=True) as client:
                await client.register_plugin(plugin)
                yield Cluster(scheduler, client, data, other)


def on_cluster(test: Callable[[Cluster], Awaitable[None]], url: str | Path, plugin: TablePlugin | None = None) -> None:
    async def _run() -> None:
        async with asyncio.timeout(60):
            async with cluster(plugin or TablePlugin(str(url))) as cluster_:
                await test(cluster_)

    asyncio.run(_run())


def test_a_group_goes_from_worker_to_worker_into_a_lease_and_is_committed(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        assert await c.append(group("g0", response_text="so")) == ["g0-0", "g0-1"]
        lease = await c.lease()
        assert (lease["status"], lease["groups"]) == ("OK", ["g0"])
        assert lease["table"]["response_text"].to_pylist() == ["so", "so"]
        for _ in range(2):
            await c.laminar_commit(lease=lease["lease"], step=1, version=0)
        assert (await c.laminar_counts())["trained"] == 2
        assert await c.laminar_rewind(step=0) == 2
        assert (await c.lease())["groups"] == ["g0"]

    on_cluster(_test, tmp_path)


def test_only_the_data_worker_owns_the_table(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        assert "laminar_append" in c.data.handlers
        assert "laminar_append" not in c.other.handlers
        assert c.data.plugins["laminar-table"].table.counts()["rows"] == 0

    on_cluster(_test, tmp_path)


def test_a_waiting_lease_is_answered_by_the_append_that_completes_it(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.append(group("g0", samples=[0]))
        lease = asyncio.ensure_future(c.lease())
        await c.somebody_waits()
        assert not lease.done()
        await c.append(group("g0", samples=[1]))
        assert (await lease)["groups"] == ["g0"]

    on_cluster(_test, tmp_path)


def test_a_lease_that_waits_in_vain_says_for_what(tmp_path: Path) -> None:
    """SkyRL #1173: 125 of 128 were there for 29 hours, and nothing was said."""

    async def _test(c: Cluster) -> None:
        await c.append(batch(*(one("g000016", n, size=8) for n in range(3)), one("g000031", 0, size=8)))
        assert await c.lease(2, deadline=0.0) == {
            "status": "waiting",
            "why": "waiting for 2 complete groups: 0 are complete, "
            "12 of 16 trajectories of groups g000016..g000031 still to come",
        }

    on_cluster(_test, tmp_path)


def test_a_dead_trainers_call_takes_nothing_and_what_it_held_comes_back(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.append(group("g0"))
        held = await c.lease()
        orphan = asyncio.ensure_future(c.lease())
        await c.somebody_waits()
        assert await c.laminar_release(lessee="trainer") == 1
        assert (await orphan)["status"] == "superseded"
        assert (await c.lease())["groups"] == ["g0"]
        with pytest.raises(LaminarError, match="is released: its rows cannot be committed"):
            await c.laminar_commit(lease=held["lease"], step=1, version=0, groups=["g0"])

    on_cluster(_test, tmp_path)


def test_appends_that_meet_are_written_together_and_answered_apart(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        good = [c.append(group(f"g{n}", samples=[sample])) for n in range(10) for sample in range(2)]
        bad = c.append(batch(one("bad", 0), one("bad", 1, size=3)))
        answers = await asyncio.gather(*good[:10], bad, *good[10:], return_exceptions=True)
        error = answers.pop(10)
        assert isinstance(error, ValueError) and "group_size is 3" in str(error)
        assert answers == [[f"g{n}-{sample}"] for n in range(10) for sample in range(2)]
        assert (await c.laminar_counts())["groups_ready"] == 10
        assert await c.append(group("g0")) == []

    on_cluster(_test, tmp_path)


def test_partial_responses_are_resumed_fenced_and_dropped_with_the_finished_row(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.laminar_partials(items=[("g0-0", 1, 3, 0, [5, 6], [-0.5, -0.25]), ("g0-1", 1, 3, 0, [7], [0.0])])
        first, second = await c.laminar_resume(keys=[["g0-0", 2], ["g0-9", 1]])
        assert (first["version"], list(first["ids"]), list(first["logprobs"])) == (3, [5, 6], [-0.5, -0.25])
        assert second is None
        assert (await c.laminar_partials(items=[("g0-0", 1, 3, 2, [9], [0.0])]))["accepted"] == 0
        await c.append(group("g0"))
        counts = await c.laminar_counts()
        assert (counts["partials"], counts["partials_refused"]) == (1, 1)  # what is left is the fence of g0-9

    on_cluster(_test, tmp_path)


def test_the_state_of_a_turn_crosses_workers_and_outlives_the_data_worker(tmp_path: Path) -> None:
    state = b'{"board": [1, 2]}'

    async def _test(c: Cluster) -> None:
        await c.laminar_partials(items=[["g0-0", 1, 3, 0, [5, 6], [-0.5, 0.0], [2, 2, state]]])
        await c.data.close()
        async with worker(c.scheduler, resources={"data": 1}) as c.data:
            (found,) = await c.laminar_resume(keys=[["g0-0", 2]])
            assert (list(found["ids"]), tuple(found["turn"])) == ([5, 6], (2, 2, state))

    on_cluster(_test, tmp_path)


def test_partial_responses_beyond_their_budget_are_counted(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        for key in ("g0-0", "g0-1"):
            await c.laminar_partials(items=[[key, 1, 3, 0, [5] * 1000, [0.0] * 1000]])
        counts = await c.laminar_counts()
        assert (counts["partials"], counts["partials_overflowed"]) == (1, 1)
        assert counts["partials_bytes"] <= 10_000

    on_cluster(_test, tmp_path, TablePlugin(str(tmp_path), partial_bytes=10_000))


def test_partial_responses_are_put_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.laminar_partials(items=[["g0-0", 1, 3, 0, [5], [0.0]]])
        journal = c.data.plugins["laminar-table"].partials._journal
        async with asyncio.timeout(DEADLINE):
            while journal._synced < journal.nbytes:
                await asyncio.sleep(0.05)

    on_cluster(_test, tmp_path)


def test_a_new_data_worker_has_what_the_last_one_acknowledged(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.append(group("g0"))
        await c.append(group("g1"))
        await c.laminar_partials(items=[("g2-0", 1, 0, 0, [5], [-0.5])])
        lease = await c.lease()
        await c.data.close()
        async with worker(c.scheduler, resources={"data": 1}) as c.data:
            await c.laminar_commit(lease=lease["lease"], step=1, version=0, groups=lease["groups"])
            assert (await c.laminar_counts()) | {"trained": 2, "ready": 2, "partials": 1} == await c.laminar_counts()
            assert (await c.lease())["groups"] == ["g1"]

    on_cluster(_test, tmp_path)


def test_the_counts_are_a_metric_of_the_data_worker(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.append(group("g0"))
        await c.data.heartbeat()
        metrics = c.scheduler.workers[c.data.address].metrics["laminar_table"]
        assert (metrics["rows"], metrics["groups_ready"], metrics["partials"]) == (2, 1, 0)

    on_cluster(_test, tmp_path)


def test_a_store_that_cannot_be_written_ends_the_registration_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def _test(c: Cluster) -> None:
        raise AssertionError("the plugin was registered")

    with pytest.raises(UserError, match=r"cannot write to .*/file/run/experience: Not a directory"):
        on_cluster(_test, tmp_path / "file/run")


def test_rules_and_evictions_reach_the_table(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.append(group("equal", reward=1.0))
        await c.append(group("orphan"))
        await c.append(group("good"))
        assert await c.laminar_evict(groups=["orphan", "unknown"], reason="version_gone") == 2
        assert (await c.lease())["groups"] == ["good"]
        counts = await c.laminar_counts()
        assert (counts["evicted_version_gone"], counts["evicted_equal_rewards"]) == (2, 2)

    on_cluster(_test, tmp_path, TablePlugin(str(tmp_path), Rules(freshest, (equal_rewards,))))


def test_rewards_that_are_all_equal_are_a_wait_that_says_so_and_not_a_crash(tmp_path: Path) -> None:
    """verl #953, #876: dynamic sampling died of having generated too many."""

    async def _test(c: Cluster) -> None:
        for number in range(20):
            await c.append(group(f"g{number}", reward=1.0))
        assert await c.lease(2, deadline=0.0) == {
            "status": "waiting",
            "why": "waiting for 2 complete groups: 0 are complete, and no trajectory of another group has arrived "
            "(40 evicted_equal_rewards)",
        }
        await c.append(group("g20"))
        await c.append(group("g21"))
        assert (await c.lease(2))["groups"] == ["g20", "g21"]

    on_cluster(_test, tmp_path, TablePlugin(str(tmp_path), Rules(evictors=(equal_rewards,))))


def test_a_lease_ends_by_itself_when_its_time_is_up(tmp_path: Path) -> None:
    async def _test(c: Cluster) -> None:
        await c.append(group("g0"))
        held = await c.lease()
        assert (await c.lease(lessee="other", deadline=0.0))["status"] == "waiting"
        again = await c.lease(lessee="other", deadline=10.0)
        assert (held["groups"], again["groups"]) == (["g0"], ["g0"])

    on_cluster(_test, tmp_path, TablePlugin(str(tmp_path), lease_seconds=0.5))


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.ENODEV])
def test_a_store_that_takes_no_more_pauses_the_replicas_and_nothing_is_lost(reason: int) -> None:
    with full_disk() as disk:

        async def _test(c: Cluster) -> None:
            await c.client.register_plugin(RolesPlugin())
            outbox = Outbox(c.other)
            await outbox.append(one("g0", 0))
            disk.room, disk.refuses = 0, reason
            stuck = asyncio.ensure_future(outbox.append(one("g0", 1)))
            while disk.room > -2:  # it was refused, and asked again
                await asyncio.sleep(0.01)
            assert not stuck.done()
            disk.room, disk.refuses = 1000, 0
            await asyncio.wait_for(stuck, DEADLINE)
            assert (await c.lease())["groups"] == ["g0"]

        on_cluster(_test, disk.url, TablePlugin(disk.url))
