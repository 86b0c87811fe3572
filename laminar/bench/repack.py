"""``bench repack``: what moving the long tail is worth, on a real Dask cluster with emulated 32B replicas.

Every replica is a worker process whose emulated engine takes the time that a TP4 replica of the 32B model takes;
trajectories are real tasks, hand-overs are real, rows go to the real table. Only the model is not there, and the
trainer only publishes a version every so often. Seconds of the results are emulated ones unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from laminar.bench import say
from laminar.bench.repack_arm import CAP, KV_TOKENS, MODES, Arm, Bench, measure_arm
from laminar.bench.repack_front import draw, least_gain
from laminar.cluster import Needs, start
from laminar.errors import UserError
from laminar.rollout.emulation import EMULATED, EmulatedVersions
from laminar.weights.segment import segment_root

__all__ = ["bench_repack"]

PAPER = Bench(replicas=16, slots=1024, time_scale=10.0, warm_seconds=600.0)
FINE_SCALE = 6.0
"""Of the pair that gives the headline: nearer to real time, so that less of what is measured is this machine's."""
FRONT = (256, 512, 1024)
PICTURE = "repack-front.png"
ARM_DEADLINE = 900.0
PAIR = ("without", "with")
PARTS = ("256", "512", "1024", "careless", "tools", "scales", "plan")

Measured = dict[str, dict[str, Any]]


def bench_repack(*, paper: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """With and without repack, and with careless rules, in one run.

    Parameters
    ----------
    paper
        The whole: 16 replicas, batches of 256, 512 and 1,024 (``front``, and its picture), careless rules, tool
        waits, and batches of 512 at a second, finer time scale (a gain that the machine limited would be larger
        there), which the fields below are of. Takes half an hour.
    only
        Of ``paper``, some parts: ``256``, ``512``, ``1024``, ``careless``, ``tools``, ``scales``, ``plan``.
        Fields that need others are left out.

    Returns
    -------
    ``generation_gain`` (tokens/s with / without, less 1), ``kv_utilisation`` and ``mean_staleness`` of both,
    ``handover_ms_median`` (real ms for which a trajectory that moves stands still), ``placed_ms_median`` (real ms
    from the request until its task runs on the other replica), ``moves_not_paying_fraction``, ``block_ms_max``
    (real ms for which the scheduler's loop served nobody during plans and moves), and each arm's own numbers.

    Raises
    ------
    UserError
        ``only`` without ``paper``, or a part that does not exist.
    """
    if not paper:
        if only:
            raise UserError(f"--only {','.join(only)} is for `bench repack --paper`; add --paper")
        arms = [Arm(mode, mode, 256) for mode in MODES]
        measured = _measure(Bench(), arms)
        figures = {"arms": measured, **_gains(measured), **_careless(measured)}
        return {**figures, "plan_ms_128_replicas": _plan_ms(), "time_scale": Bench.time_scale}
    if unknown := set(only) - set(PARTS):
        raise UserError(f"bench repack has no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return _paper(lambda part: not only or part in only)


def _paper(wanted: Callable[[str], bool]) -> dict[str, Any]:
    arms = [Arm(f"{mode}-{batch}", mode, batch) for batch in FRONT if wanted(str(batch)) for mode in PAIR]
    arms += [Arm("careless-512", "careless", 512)] if wanted("careless") else []
    measured = _measure(PAPER, arms)
    of_512 = {mode: measured[f"{mode}-512"] for mode in MODES if f"{mode}-512" in measured}
    result: dict[str, Any] = {"arms": measured, **_gains(of_512), **_careless(of_512), "time_scale": PAPER.time_scale}
    front = [
        {"batch": batch, "mode": mode, **{name: measured[f"{mode}-{batch}"][name] for name in _POINT}}
        for batch in FRONT
        for mode in PAIR
        if f"{mode}-{batch}" in measured
    ]
    result["front"] = front
    if len(front) == len(FRONT) * len(PAIR):
        draw(front, PICTURE)
        result |= {"front_picture": str(Path(PICTURE).resolve()), "front_least_gain": least_gain(front)}
    pair = [Arm(mode, mode, 512) for mode in PAIR]
    if wanted("tools"):
        tools = _measure(replace(PAPER, tool_calls=8), pair)
        result |= {"tools_gain": _gain(tools), "tools": tools}
    if wanted("scales"):
        fine = _measure(replace(PAPER, time_scale=FINE_SCALE), pair)
        if all(mode in of_512 for mode in PAIR):
            rates = [fine[mode]["tokens_per_second"] / of_512[mode]["tokens_per_second"] for mode in PAIR]
            result |= {
                "other_scale": PAPER.time_scale,
                "other_scale_gain": _gain(of_512),
                "scales_differ": max(abs(rate - 1) for rate in rates),
            }
        result |= {**_gains(fine), "fine_arms": fine, "time_scale": FINE_SCALE}
    if wanted("plan"):
        result["plan_ms_128_replicas"] = _plan_ms()
    return result


_POINT = ("tokens_per_second", "staleness")


def _gain(measured: Measured) -> float:
    return float(measured["with"]["tokens_per_second"] / measured["without"]["tokens_per_second"] - 1)


def _gains(measured: Measured) -> dict[str, Any]:
    """The fields of one setting, as far as its arms were measured."""
    if not all(mode in measured for mode in PAIR):
        return {}
    off, on = measured["without"], measured["with"]
    return {
        "generation_gain": _gain(measured),
        "kv_utilisation": on["kv_utilisation"],
        "kv_utilisation_without": off["kv_utilisation"],
        "mean_staleness": on["staleness"],
        "mean_staleness_without": off["staleness"],
        "moves_not_paying_fraction": on["not_paying_fraction"],
        **{name: on[name] for name in ("handover_ms_median", "placed_ms_median", "plan_ms_max", "block_ms_max")},
        "handover_emulated_seconds_median": on["handover_emulated_seconds_median"],
    }


def _careless(measured: Measured) -> dict[str, Any]:
    """What careless rules are worth beside none, if they were measured."""
    if "careless" not in measured:
        return {}
    careless = measured["careless"]
    result = {"careless_not_paying_fraction": careless["not_paying_fraction"]}
    if "without" in measured:
        gain = careless["tokens_per_second"] / measured["without"]["tokens_per_second"] - 1
        result |= {"careless_gain": gain, "careless_mean_staleness": careless["staleness"]}
    return result


def _measure(bench: Bench, arms: Sequence[Arm]) -> Measured:
    """One arm after the other on one cluster, by name."""
    found: Measured = {}
    if arms:
        with _cluster(bench) as (client, run, folder):
            for arm in arms:
                say(f"{arm.id}: {bench.replicas} replicas, batches of {arm.batch}, time scale {bench.time_scale:g}")
                task = client.submit(measure_arm, bench, arm, run, folder, resources={"data": 1}, pure=False)
                found[arm.id] = task.result(timeout=ARM_DEADLINE)
                say(f"{arm.id}: {found[arm.id]['tokens_per_second']:,.0f} tokens/s")
    return found


@contextlib.contextmanager
def _cluster(bench: Bench) -> Iterator[tuple[Any, str, str]]:
    """Replicas that serve version 0; the client, the run's id and its folder."""
    from laminar_dask.environment import FullMarksPlugin
    from laminar_dask.relay import RelayPlugin
    from laminar_dask.replica import ReplicaPlugin, ReplicaSettings
    from laminar_dask.roles import RolesPlugin
    from laminar_dask.table import TablePlugin

    run = f"bench-repack-{time.time_ns()}"
    replica = ReplicaSettings(
        run=run,
        model=EMULATED,
        engine=EMULATED,
        kv_tokens=KV_TOKENS,
        slots=bench.slots,
        threads=1,
        seed=bench.seed,
        trajectory_deadline=3600.0,
        emulation=bench.emulation,
    )
    with tempfile.TemporaryDirectory() as folder, start(Needs(bench.replicas, bench.slots), run) as cluster:
        plugins = [RolesPlugin(), TablePlugin(folder), RelayPlugin(run), ReplicaPlugin(replica)]
        for plugin in [*plugins, FullMarksPlugin(EMULATED)]:
            cluster.client.register_plugin(plugin)
        EmulatedVersions(segment_root(run)).publish(0)
        yield cluster.client, run, folder


def _plan_ms(rounds: int = 5) -> float:
    """Real ms of a plan for 128 replicas with 256 trajectories each; the median of some."""
    from laminar.repack import NEVER, Load, Rules, plan
    from laminar.rollout.engines.emulated_workload import response_tokens, step_curve
    from laminar.rollout.lengths import Lengths

    rng = np.random.default_rng(0)
    lengths, drawn = Lengths(CAP), response_tokens("32B math")
    for number in range(2000):
        lengths.finished(f"g{number}", round(drawn.value(float(rng.random()))))
    loads = []
    for number in range(128):
        tokens = rng.uniform(0, 4000, 256)
        keys = tuple(f"{number}-{i}" for i in range(256))
        never, ones = np.full(256, NEVER), np.ones(256)
        loads.append(Load(f"r{number}", 0, 3 * KV_TOKENS, True, 0, keys, tokens + 300, tokens, never, ones))
    rules = Rules(step_curve("32B", 4), CAP, batch_bound=600, prefill_rate=25_000.0)
    survival, seconds = lengths.survival(), []
    for _ in range(rounds):
        began = time.perf_counter()
        plan(loads, rules, survival, now=0.0)
        seconds.append(time.perf_counter() - began)
    return 1000 * float(np.median(seconds))
