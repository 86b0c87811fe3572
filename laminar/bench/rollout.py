"""``bench rollout``: what tasks, streaming, scoring and storing cost on top of the engine library.

The same prompts go, in turn, through Laminar (a real cluster with one replica: one Dask task a trajectory, tokens
streamed to the partial pool, rewards scored, rows written ahead and acknowledged) and through ``transformers``'
continuous batching alone in a process of its own. Both on one thread, the same cache, the same model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from laminar.bench.library_alone import LibraryAlone
from laminar.cluster import Needs, RunningCluster, start
from laminar.environments.reasoning_gym import reasoning_gym
from laminar.rollout.tokens import encode, load_tokenizer
from laminar.trajectory import Sampling, TrajectoryRequest

__all__ = ["bench_rollout"]

MODEL = Path(__file__).parents[2] / "flows" / "models" / "running-sums"
KV_TOKENS = 65536
SLOTS = 128
RUN = "bench-rollout"


def bench_rollout(*, prompts: int = 512, terms: int = 8, repeats: int = 5) -> dict[str, Any]:
    """Measure both sides ``repeats`` times in turn, after one unmeasured round each.

    Parameters
    ----------
    prompts
        Trajectories of one round, of different prompts.
    terms
        Numbers in the longest sum: longer sums give longer answers.

    Returns
    -------
    ``ratio`` (medians of tokens/s, ours / the library's), both medians, and every round's figure.
    """
    environment = reasoning_gym("chain_sum", size=prompts, min_terms=2, max_terms=terms, max_digits=2)
    tokenizer = load_tokenizer(str(MODEL))
    encoded = [encode(tokenizer, environment.prompt(i)) for i in range(prompts)]
    sampling = Sampling(temperature=1.0, max_new_tokens=192)
    ours: list[float] = []
    alone: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LibraryAlone(str(MODEL), kv_tokens=KV_TOKENS, slots=SLOTS) as library,
        start(Needs(replicas=1, slots=SLOTS), RUN) as cluster,
    ):
        replica = _set_up(cluster, folder, environment)
        for number in range(repeats + 1):
            requests = [
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
        "trajectories": prompts,
        "repeats": repeats,
    }


def _set_up(cluster: RunningCluster, folder: str, environment: Any) -> str:
    """One replica that serves version 0; returns its address."""
    from laminar_dask.environment import EnvironmentPlugin
    from laminar_dask.relay import RelayPlugin
    from laminar_dask.replica import ReplicaPlugin, ReplicaSettings
    from laminar_dask.roles import RolesPlugin
    from laminar_dask.table import TablePlugin

    settings = ReplicaSettings(
        run=RUN,
        model=str(MODEL),
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
    cluster.client.submit(publish_base, str(MODEL), RUN, resources={"data": 1}).result(timeout=120)
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

    from laminar_dask.replica import trajectory

    began = time.perf_counter()
    futures = cluster.client.map(
        trajectory,
        requests,
        key=[request.key for request in requests],
        workers=[replica],
        resources={"rollout": 1},
        pure=False,
    )
    with cluster.client.as_current():
        wait(futures, timeout=600)
    seconds = time.perf_counter() - began
    return float(sum(result["tokens"] for result in cluster.client.gather(futures)) / seconds)
