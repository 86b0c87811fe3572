"""``bench rollout``: what tasks, streaming, scoring and storing cost on top of the engine library.

The same prompts go, in turn, through Laminar (a real cluster with one replica: one Dask task a trajectory, tokens
streamed to the partial pool, rewards scored, rows written ahead and acknowledged) and through ``transformers``'
continuous batching alone in a process of its own. Both on one thread, the same cache, attention and model.

What a trajectory costs does not depend on its length, so the ratio does: it is measured with answers of some hundred
tokens (a random model, geometric lengths), and again with the very short ones of the quickstart's base model.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.bench.library_alone import LibraryAlone
from laminar.bench.models import BASE, talkative_model
from laminar.cluster import Needs, RunningCluster, start
from laminar.environments.reasoning_gym import reasoning_gym
from laminar.rollout.tokens import encode, load_tokenizer
from laminar.trajectory import Sampling, TrajectoryRequest

__all__ = ["bench_rollout"]

KV_TOKENS = 131072
SLOTS = 128
RUN = f"bench-rollout-{os.getpid()}"


@dataclass(frozen=True)
class Work:
    """One setting: a model, how many prompts a round has, and where answers are cut."""

    model: Path
    prompts: int
    max_new_tokens: int


def bench_rollout(*, repeats: int = 5) -> dict[str, Any]:
    """Measure both sides ``repeats`` times in turn, after one unmeasured round each.

    Returns
    -------
    ``ratio`` (medians of tokens/s, ours / the library's) with the medians and every round, and the same for the
    quickstart's answers under ``short``.
    """
    with tempfile.TemporaryDirectory() as folder:
        long = Work(talkative_model(Path(folder), mean_tokens=512, longest=1024), prompts=128, max_new_tokens=512)
        measured = _measure(long, repeats)
    return {**measured, "short": _measure(Work(BASE, prompts=384, max_new_tokens=128), repeats)}


def _measure(work: Work, repeats: int) -> dict[str, Any]:
    environment = reasoning_gym("chain_sum", size=work.prompts, min_terms=2, max_terms=6, max_digits=2)
    tokenizer = load_tokenizer(str(work.model))
    encoded = [encode(tokenizer, environment.prompt(i)) for i in range(work.prompts)]
    sampling = Sampling(temperature=1.0, max_new_tokens=work.max_new_tokens)
    ours: list[float] = []
    alone: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LibraryAlone(str(work.model), kv_tokens=KV_TOKENS, slots=SLOTS) as library,
        start(Needs(replicas=1, slots=SLOTS), RUN) as cluster,
    ):
        replica = _set_up(cluster, folder, environment, str(work.model))
        for number in range(repeats + 1):
            requests = _requests(environment, encoded, sampling, number)
            measured = (_through_laminar(cluster, requests, replica), library.measure(encoded, sampling))
            if number:
                ours.append(measured[0])
                alone.append(measured[1])
    return {
        "ratio": statistics.median(ours) / statistics.median(alone),
        "laminar_tokens_per_second": statistics.median(ours),
        "library_tokens_per_second": statistics.median(alone),
        "laminar_rounds": ours,
        "library_rounds": alone,
        "trajectories": work.prompts,
        "repeats": repeats,
    }


def _requests(environment: Any, encoded: list[Any], sampling: Sampling, number: int) -> list[TrajectoryRequest]:
    return [
        TrajectoryRequest(
            run=RUN,
            group=f"g{number:02d}{index:04d}",
            sample=0,
            group_size=1,
            prompt=environment.prompt(index),
            prompt_ids=ids,
            sampling=sampling,
            environment=environment.fingerprint(),
            queued_at=time.time(),
        )
        for index, ids in enumerate(encoded)
    ]


def _set_up(cluster: RunningCluster, folder: str, environment: Any, model: str) -> str:
    """One replica that serves version 0; returns its address."""
    from laminar_dask.environment import EnvironmentPlugin
    from laminar_dask.relay import RelayPlugin
    from laminar_dask.replica import ReplicaPlugin, ReplicaSettings
    from laminar_dask.roles import RolesPlugin
    from laminar_dask.table import TablePlugin

    settings = ReplicaSettings(
        run=RUN,
        model=model,
        engine="transformers",
        kv_tokens=KV_TOKENS,
        slots=SLOTS,
        threads=1,
        seed=0,
        trajectory_deadline=600.0,
    )
    plugins = [
        RolesPlugin(),
        TablePlugin(folder),
        RelayPlugin(RUN),
        ReplicaPlugin(settings),
        EnvironmentPlugin(environment.fingerprint(), environment, deadline=10.0),
    ]
    for plugin in plugins:
        cluster.client.register_plugin(plugin)
    cluster.client.submit(publish_base, model, RUN, resources={"data": 1}).result(timeout=120)
    workers = cluster.client.scheduler_info(n_workers=-1)["workers"]
    return next(str(address) for address, worker in workers.items() if "rollout" in worker["resources"])


async def publish_base(model: str, run: str) -> None:
    """Publish a checkpoint's weights as version 0. A task for the data worker."""
    import asyncio

    from distributed import get_worker

    from laminar.trainer.config import GRPO, AdamW
    from laminar.trainer.learner import Learner
    from laminar.weights.layout import Layout
    from laminar.weights.publisher import Publisher
    from laminar.weights.segment import segment_root
    from laminar_dask.relay import announce, prepare
    from laminar_dask.roles import peer

    worker = get_worker()
    relay = await peer(worker, "relay")
    tensors = Learner(model, GRPO(), AdamW(), temperature=1.0, seed=0).tensors()
    await prepare(worker, relay, Layout.of(tensors))
    publisher = Publisher(segment_root(run))
    await asyncio.to_thread(publisher.publish, 0, tensors)
    publisher.close()
    await announce(worker, relay, 0)


def _through_laminar(cluster: RunningCluster, requests: list[TrajectoryRequest], replica: str) -> float:
    from distributed import wait

    from laminar_dask.trajectories import submit

    began = time.perf_counter()
    futures = submit(cluster.client, requests, near=replica)
    with cluster.client.as_current():
        wait(futures, timeout=600)
    seconds = time.perf_counter() - began
    return float(sum(result["tokens"] for result in cluster.client.gather(futures)) / seconds)
