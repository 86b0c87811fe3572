"""``bench repack``: what moving the long tail is worth, on a real Dask cluster with emulated 32B replicas.

Every replica is a worker process whose emulated engine takes the time that a TP4 replica of the 32B model takes;
trajectories are real tasks, hand-overs are real, rows go to the real table. Only the model is not there, and the
trainer only publishes a version every so often. Seconds of the results are emulated ones unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laminar.cluster import Needs, start
from laminar.experience.reader import Experience
from laminar.rollout.emulation import EMULATED, PROMPT_TOKENS, EmulatedVersions, Emulation
from laminar.trajectory import Prompt, Sampling, TrajectoryRequest
from laminar.weights.segment import segment_root

__all__ = ["Arm", "Bench", "bench_repack"]

KV_TOKENS = 850_000
CAP = 16384
GROUP = 16
SAMPLING = Sampling(max_new_tokens=CAP)
MODES: dict[str, dict[str, Any]] = {
    "without": {"automatic": False},
    "with": {},
    "careless": {"margin": 0.0, "pause": 0.0},
}
"""How an arm repacks: settings of the plugin that differ from the defaults."""


@dataclass(frozen=True)
class Bench:
    """Sizes of one benchmark."""

    replicas: int = 8
    slots: int = 512
    time_scale: float = 20.0
    version_seconds: float = 300.0
    warm_seconds: float = 400.0
    seconds: float = 900.0
    tool_calls: int = 0
    seed: int = 0

    @property
    def emulation(self) -> Emulation:
        """Of every replica."""
        return Emulation(time_scale=self.time_scale, tool_calls=self.tool_calls, seed=self.seed)


@dataclass(frozen=True)
class Arm:
    """One measurement."""

    name: str
    mode: str
    batch: int


PAPER = Bench(replicas=16, slots=1024, time_scale=12.0, warm_seconds=600.0, seconds=2400.0)
FRONT = (256, 512, 1024)


def bench_repack(*, paper: bool = False, picture: str = "repack-front.png") -> dict[str, Any]:
    """With and without repack, and with careless rules, in one run.

    Parameters
    ----------
    paper
        The whole: 16 replicas, batches of 256, 512 and 1,024, tool waits, a second time scale. Takes an hour.
    picture
        Where ``paper`` draws throughput over staleness.

    Returns
    -------
    ``generation_gain`` (tokens/s with / without, less 1), ``kv_utilisation`` and ``mean_staleness`` of both,
    ``handover_ms_median`` (real ms, same key), ``moves_not_paying_fraction``, and each arm's own numbers.
    """
    if not paper:
        arms = [Arm(mode, mode, 256) for mode in MODES]
        return _gains(_measure(Bench(), arms), "")
    arms = [Arm(f"{mode} {batch}", mode, batch) for batch in FRONT for mode in ("without", "with")]
    arms.append(Arm("careless 512", "careless", 512))
    measured = _measure(PAPER, arms)
    slower = replace(PAPER, time_scale=PAPER.time_scale / 2)
    again = _measure(slower, [Arm(f"{mode} 512", mode, 512) for mode in ("without", "with")])
    tools = _measure(replace(PAPER, tool_calls=8), [Arm(f"{mode} 512", mode, 512) for mode in ("without", "with")])
    front = [
        {
            "batch": batch,
            "mode": mode,
            **{k: measured[f"{mode} {batch}"][k] for k in ("tokens_per_second", "staleness")},
        }
        for batch in FRONT
        for mode in ("without", "with")
    ]
    _draw(front, picture)
    return {
        **_gains(measured, " 512"),
        "front": front,
        "front_picture": str(Path(picture).resolve()),
        "tools_gain": tools["with 512"]["tokens_per_second"] / tools["without 512"]["tokens_per_second"] - 1,
        "scales": [PAPER.time_scale, slower.time_scale],
        "scales_differ": max(
            abs(again[name]["tokens_per_second"] / measured[name]["tokens_per_second"] - 1) for name in again
        ),
    }


def _gains(measured: dict[str, dict[str, Any]], suffix: str) -> dict[str, Any]:
    off, on, careless = (measured[f"{mode}{suffix}"] for mode in MODES)
    return {
        "generation_gain": on["tokens_per_second"] / off["tokens_per_second"] - 1,
        "careless_gain": careless["tokens_per_second"] / off["tokens_per_second"] - 1,
        "kv_utilisation": on["kv_utilisation"],
        "kv_utilisation_without": off["kv_utilisation"],
        "mean_staleness": on["staleness"],
        "mean_staleness_without": off["staleness"],
        "handover_ms_median": on["handover_ms_median"],
        "moves_not_paying_fraction": on["not_paying_fraction"],
        "careless_not_paying_fraction": careless["not_paying_fraction"],
        "plan_ms_max": on["plan_ms_max"],
        "block_ms_max": on["block_ms_max"],
        "arms": measured,
    }


def _measure(bench: Bench, arms: list[Arm]) -> dict[str, dict[str, Any]]:
    run = f"bench-repack-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder, start(Needs(bench.replicas, bench.slots), run) as cluster:
        return asyncio.run(_arms(bench, arms, run, folder, cluster.client.scheduler.address))


async def _arms(bench: Bench, arms: list[Arm], run: str, folder: str, address: str) -> dict[str, dict[str, Any]]:
    from distributed import Client

    async with Client(address, asynchronous=True) as client:
        driver = _Driver(bench, run, folder, client)
        await driver.set_up()
        return {arm.name: await driver.measure(number, arm) for number, arm in enumerate(arms)}


class _Driver:
    """Feeds the replicas and looks at their engines."""

    def __init__(self, bench: Bench, run: str, folder: str, client: Any) -> None:
        self.bench, self.run, self.folder, self.client = bench, run, folder, client
        self.versions = EmulatedVersions(segment_root(run))
        self.version = 0
        self.serial = 0
        self.freed: dict[str, asyncio.Event] = {}
        self.futures: set[Any] = set()

    async def set_up(self) -> None:
        """Register the plugins of a run."""
        from laminar_dask.environment import FullMarksPlugin
        from laminar_dask.relay import RelayPlugin
        from laminar_dask.repack import freed_topic
        from laminar_dask.replica import ReplicaPlugin, ReplicaSettings
        from laminar_dask.roles import RolesPlugin
        from laminar_dask.table import TablePlugin

        bench = self.bench
        settings = ReplicaSettings(
            run=self.run,
            model=EMULATED,
            engine=EMULATED,
            kv_tokens=KV_TOKENS,
            slots=bench.slots,
            threads=1,
            seed=bench.seed,
            trajectory_deadline=3600.0,
            emulation=bench.emulation,
        )
        plugins = [
            RolesPlugin(),
            TablePlugin(self.folder),
            RelayPlugin(self.run),
            ReplicaPlugin(settings),
            FullMarksPlugin(EMULATED),
        ]
        for plugin in plugins:
            await self.client.register_plugin(plugin)
        self.versions.publish(0)
        self.client.subscribe_topic(freed_topic(self.run), self._on_freed)
        self.addresses = list(await self.client.scheduler.laminar_workers(role="rollout"))

    async def measure(self, number: int, arm: Arm) -> dict[str, Any]:
        """One arm, from empty replicas to empty replicas."""
        from laminar_dask.repack import RepackPlugin, RepackSettings

        bench = self.bench
        settings = RepackSettings(
            run=self.run, cap=CAP, slots=bench.slots, time_scale=bench.time_scale, **MODES[arm.mode]
        )
        await self.client.register_plugin(RepackPlugin(settings))
        async with self._going(number, arm):
            await asyncio.sleep(bench.warm_seconds / bench.time_scale)
            began, before = time.time(), await self._look()
            await asyncio.sleep(bench.seconds / bench.time_scale)
            after, ended = await self._look(), time.time()
            status = await self.client.scheduler.laminar_repack_status()
        seconds = sum(after[a]["seconds"] - before[a]["seconds"] for a in after) / len(after)
        gained = {name: sum(after[a][name] - before[a][name] for a in after) for name in after[self.addresses[0]]}
        staleness = await asyncio.to_thread(self._staleness, number, began, ended)
        reviewed = status["releases_reviewed"]
        return {
            "tokens_per_second": gained["decoded"] / seconds,
            "kv_utilisation": gained["kv_seconds"] / gained["seconds"] / KV_TOKENS,
            "preemptions": gained["preemptions"],
            "prefilled_per_decoded": gained["prefilled"] / gained["decoded"],
            "not_paying_fraction": status["releases_not_paying"] / reviewed if reviewed else 0.0,
            **staleness,
            **{name: status[name] for name in _KEPT},
        }

    @contextlib.asynccontextmanager
    async def _going(self, number: int, arm: Arm) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._feed(number, arm, address)) for address in self.addresses]
        tasks.append(asyncio.create_task(self._publish()))
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()  # it only ends by an error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.cancel(list(self.futures), force=True)
            self.futures.clear()
            await asyncio.wait_for(self._until_empty(), 120)

    async def _feed(self, number: int, arm: Arm, address: str) -> None:
        """New groups for a replica whenever it has nothing left to do."""
        from distributed import wait

        from laminar_dask.trajectories import submit

        freed = self.freed.setdefault(address, asyncio.Event())
        while True:
            freed.clear()
            requests = self._requests(number, arm.batch)
            futures = submit(self.client, requests, near=address)
            self.futures.update(futures)
            done = asyncio.ensure_future(wait(futures))
            done.add_done_callback(lambda _, of_batch=futures: self.futures.difference_update(of_batch))
            emptied = asyncio.ensure_future(freed.wait())
            await asyncio.wait({done, emptied}, return_when=asyncio.FIRST_COMPLETED)
            emptied.cancel()
            if failed := [future for future in futures if future.status == "error"]:
                await failed[0]

    def _requests(self, number: int, batch: int) -> list[TrajectoryRequest]:
        requests = []
        for _ in range(batch // GROUP):
            group = f"a{number}g{self.serial:06d}"
            self.serial += 1
            first = TrajectoryRequest(
                run=self.run,
                group=group,
                sample=0,
                group_size=GROUP,
                prompt=Prompt(id=group, text=""),
                prompt_ids=(PROMPT_TOKENS,),
                sampling=SAMPLING,
                environment=EMULATED,
                queued_at=time.time(),
            )
            requests += [replace(first, sample=sample) for sample in range(GROUP)]
        return requests

    async def _publish(self) -> None:
        """The trainer: a new version every so often."""
        while True:
            await asyncio.sleep(self.bench.version_seconds / self.bench.time_scale)
            self.version += 1
            self.versions.publish(self.version)
            await self.client.scheduler.laminar_repack_published(version=self.version)

    def _on_freed(self, event: tuple[float, dict[str, Any]]) -> None:
        self.freed.setdefault(event[1]["worker"], asyncio.Event()).set()

    async def _look(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = await self.client.run(measures, workers=self.addresses)
        return found

    async def _until_empty(self) -> None:
        while any(look["running"] for look in (await self._look()).values()):
            await asyncio.sleep(0.1)

    def _staleness(self, number: int, began: float, ended: float) -> dict[str, Any]:
        found = Experience(self.folder).query(
            "select avg(finish_version - weight_version) as staleness, count(*) as trajectories, "
            "avg(migrations) as migrations_mean, max(migrations) as migrations_max from experience "
            f"where group_id like 'a{number}g%' and finished_at between {began} and {ended}"
        )
        return dict(found.to_pylist()[0])


_KEPT = (
    "moves",
    "trajectories_moved",
    "replicas_freed",
    "releases_reviewed",
    "gain_expected",
    "gain_measured",
    "handover_ms_median",
    "placed_ms_median",
    "plan_ms_max",
    "block_ms_max",
    "batch_bound",
)


def measures(dask_worker: Any) -> dict[str, Any]:
    """What the engine of a replica has done. Runs on its worker."""
    plugin = dask_worker.plugins["laminar-replica"]
    return {**plugin.serving.engine.measures(), "running": len(plugin.attempts) + len(plugin.running)}


def _draw(front: list[dict[str, Any]], path: str) -> None:
    """Throughput over staleness, one line with and one without repack."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for mode in ("without", "with"):
        points = [point for point in front if point["mode"] == mode]
        x = [point["staleness"] for point in points]
        axes.plot(x, [point["tokens_per_second"] / 1000 for point in points], marker="o", label=f"{mode} repack")
        for point in points:
            axes.annotate(str(point["batch"]), (point["staleness"], point["tokens_per_second"] / 1000))
    axes.set(xlabel="mean staleness (versions)", ylabel="thousand tokens/s", title="batch size marked at each point")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
