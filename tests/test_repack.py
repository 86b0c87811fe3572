"""Repack's rules, on thousands of drawn clusters and on the paper's own curve."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.repack import NEVER, Idleness, Load, Rules, drain_seconds, hindsight, plan, spread
from laminar.rollout.engines.emulated_workload import response_tokens, step_curve
from laminar.rollout.latency import LatencyMeter, StepCurve
from laminar.rollout.lengths import Lengths

CAP = 16384
KV = 850_000
CURVE = step_curve("32B", 4)
NOW = 1000.0


def make_load(name: str, generated: list[float], *, version: int = 0, idle: bool = True, **options: float) -> Load:
    tokens = np.array(generated, dtype=np.float64)
    moved = options.get("moved_at", NEVER)
    return Load(
        name=name,
        version=version,
        kv_total=int(options.get("kv_total", KV)),
        idle=idle,
        waiting=int(options.get("waiting", 0)),
        keys=tuple(f"{name}-{i}" for i in range(len(tokens))),
        kv=tokens + 300,
        generated=tokens,
        moved_at=np.full(len(tokens), moved),
        factor=np.ones(len(tokens)),
    )


def learnt() -> Lengths:
    lengths, drawn = Lengths(CAP), response_tokens("32B math")
    for i in range(2000):
        lengths.finished(f"g{i}", round(drawn.value(random.Random(i).random())))
    return lengths


SURVIVAL = learnt().survival()
UNKNOWN = Lengths(CAP).survival()

replicas = st.lists(
    st.builds(
        lambda size, most, seed, version, idle, waiting, kv_total, moved: make_load(
            f"r{seed}",
            [random.Random(f"{seed} {i}").uniform(0, most) for i in range(size)],
            version=version,
            idle=idle,
            waiting=waiting,
            kv_total=kv_total,
            moved_at=moved,
        ),
        size=st.integers(0, 48),
        most=st.sampled_from([50, 2000, 8000, 16000]),
        seed=st.integers(0, 10**6),
        version=st.integers(0, 2),
        idle=st.sampled_from([True, True, True, False]),
        waiting=st.sampled_from([0, 0, 0, 5]),
        kv_total=st.sampled_from([50_000, KV]),
        moved=st.sampled_from([NEVER, NEVER, NOW - 60, NOW - 5]),
    ),
    max_size=12,
    unique_by=lambda load: load.name,
)
rule_sets = st.builds(
    Rules,
    curve=st.just(CURVE),
    cap=st.just(CAP),
    batch_bound=st.sampled_from([0, 8, 30, 88]),
    prefill_rate=st.sampled_from([0.0, 25_000.0]),
    margin=st.sampled_from([-1.0, 0.0, 1.0]),
    pause=st.sampled_from([0.0, 30.0]),
    kv_limit=st.sampled_from([0.5, 0.99]),
)


@settings(max_examples=2000, deadline=None)
@given(loads=replicas, rules=rule_sets, known=st.booleans(), seed=st.integers(0, 10**6))
def test_a_plan_keeps_every_bound_in_whatever_order_it_is_executed(
    loads: list[Load], rules: Rules, known: bool, seed: int
) -> None:
    result = plan(loads, rules, SURVIVAL if known else UNKNOWN, now=NOW)
    by_name = {load.name: load for load in loads}
    count = {load.name: load.count for load in loads}
    used = {load.name: load.kv_used for load in loads}
    kv_of = {key: kv for load in loads for key, kv in zip(load.keys, load.kv, strict=True)}
    targets = {move.target for move in result.moves}
    assert not targets & set(result.released)  # a destination is never released
    moves = list(result.moves)
    random.Random(seed).shuffle(moves)
    for move in moves:
        source, target = by_name[move.source], by_name[move.target]
        assert source is not target and source.version == target.version
        assert target.idle and not target.waiting and source.idle and not source.waiting
        assert float((NOW - source.moved_at).min()) >= rules.pause
        count[move.target] += len(move.keys)
        used[move.target] += sum(kv_of[key] for key in move.keys)
        assert count[move.target] <= rules.batch_bound
        assert used[move.target] <= rules.kv_limit * target.kv_total * (1 + 1e-6)
    for release in result.releases:
        moved = [key for move in release.moves for key in move.keys]
        assert sorted(moved) == sorted(by_name[release.source].keys)  # all of it, nothing twice
        assert release.saved >= (1 + rules.margin) * release.cost


@pytest.mark.parametrize("loads", [[], [make_load("a", [100.0] * 3)], [make_load("a", []), make_load("b", [])]])
def test_a_group_of_one_or_none_gives_an_empty_plan(loads: list[Load]) -> None:
    assert plan(loads, Rules(CURVE, CAP), SURVIVAL, now=NOW).moves == ()


def test_the_tails_of_one_version_are_put_together_and_others_left_alone() -> None:
    loads = [
        make_load("a", [5000.0] * 4),
        make_load("b", [5000.0] * 40),
        make_load("c", [5000.0] * 4, version=1),
        make_load("d", [5000.0] * 4, idle=False),
    ]
    [release] = plan(loads, Rules(CURVE, CAP), SURVIVAL, now=NOW).releases
    assert (release.source, [move.target for move in release.moves]) == ("a", ["b"])
    assert release.gain > 0


def test_a_source_is_spread_where_no_destination_has_room_for_all_of_it() -> None:
    loads = [make_load(name, [3000.0] * count) for name, count in (("a", 60), ("b", 70), ("c", 70))]
    [release, *_] = plan(loads, Rules(CURVE, CAP, batch_bound=110, prefill_rate=1e9), SURVIVAL, now=NOW).releases
    assert release.source == "a" and {move.target for move in release.moves} == {"b", "c"}


def test_there_is_room_for_what_trajectories_will_grow_to() -> None:
    loads = [make_load(name, [1000.0] * 50, kv_total=150_000) for name in "ab"]
    assert sum(load.kv_used for load in loads) < 0.99 * 150_000
    result = plan(loads, Rules(CURVE, CAP), SURVIVAL, now=NOW)
    assert result.moves == () and result.refused == {"no_room": 2}


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    slow_prefill = Rules(CURVE, CAP, prefill_rate=100.0)
    loads = [make_load(name, [5000.0] * 20) for name in "ab"]
    assert plan(loads, slow_prefill, SURVIVAL, now=NOW).refused == {"does_not_pay": 2}
    assert plan(loads, replace(slow_prefill, margin=-1.0), SURVIVAL, now=NOW).moves


def figure_9(at: float) -> tuple[int, int]:
    """KV use (of 1000) and waiting trajectories of the paper's Figure 9 at a time in seconds."""
    kv = np.interp(at, [30, 144, 328, 455, 670, 676], [0, 995, 997, 52, 115, 50])
    waiting = np.interp(at, [30, 144, 217, 328], [0, 0, 111, 0])
    return int(kv), int(np.ceil(waiting)) if at < 328 else 0


@pytest.mark.parametrize("phase", range(5))
def test_idleness_fires_in_every_check_of_the_ramp_down_and_in_none_before(phase: int) -> None:
    look, seen = Idleness(), {}
    for at in range(30 + phase, 676, 5):
        kv, waiting = figure_9(at)
        look = look.after(kv_used=kv, kv_total=1000, waiting=waiting, filled=1)
        seen[at] = look.idle
    ramp_down = [idle for at, idle in seen.items() if at > 330]
    assert all(ramp_down) and len(ramp_down) >= 69
    assert not any(idle for at, idle in seen.items() if at < 328)
    assert not look.after(kv_used=10, kv_total=1000, waiting=0, filled=2).idle  # refilled


def test_the_batch_bound_follows_from_the_measured_curve() -> None:
    roofline = StepCurve(tuple((b, 0.01 + 0.0001 * b) for b in (1, 64, 128, 256, 512)))
    assert roofline.batch_bound() == pytest.approx(2 * 0.01 / 0.0001, abs=1)
    assert 256 < CURVE.batch_bound() < 400
    assert StepCurve(((4, 0.01),)).batch_bound() == 8  # no further than twice what was measured


def test_the_meter_measures_a_step_in_spite_of_a_stall() -> None:
    meter = LatencyMeter()
    for round_ in range(9):
        for batch in (1, 30, 200):
            seconds = 100 * float(CURVE.seconds(batch)) * (5 if round_ == 4 else 1)
            meter.add(batch=batch, tokens=100 * batch, seconds=seconds)
    curve = meter.curve()
    assert curve is not None
    for batch in (1, 30, 200):
        assert float(curve.seconds(batch)) == pytest.approx(float(CURVE.seconds(batch)))


@given(
    moved=st.lists(st.integers(1, CAP), min_size=1, max_size=40),
    stayed=st.lists(st.integers(1, CAP), max_size=40),
)
def test_hindsight_counts_replica_seconds(moved: list[int], stayed: list[int]) -> None:
    a, b = np.array(moved, dtype=float), np.array(stayed, dtype=float)
    saved, cost = hindsight(a, b, CURVE, stall=2.0, overhead=1.0)
    assert saved == pytest.approx(drain_seconds(a, CURVE))
    assert cost >= 3.0 - 1e-9 and drain_seconds(np.append(a, b), CURVE) <= saved + drain_seconds(b, CURVE) + 1e-6


def test_a_drained_replica_is_spread_over_the_others_of_its_version() -> None:
    others = [make_load("b", [10.0] * 3), make_load("c", [10.0] * 9), make_load("d", [], version=7)]
    chosen = spread(make_load("a", [100.0] * 64), others, Rules(CURVE, CAP))
    assert sorted(len(keys) for keys in chosen.values()) == [29, 35] and "d" not in chosen
    assert len({key for keys in chosen.values() for key in keys}) == 64


def test_a_plan_for_128_replicas_in_their_tail_releases_half_of_them() -> None:
    rng = np.random.default_rng(0)
    loads = [make_load(f"r{i}", list(rng.uniform(0, 4000, 256)), kv_total=2_600_000) for i in range(128)]
    rules = Rules(CURVE, CAP, batch_bound=600, prefill_rate=25_000.0)
    assert len(plan(loads, rules, SURVIVAL, now=NOW).releases) == 64
