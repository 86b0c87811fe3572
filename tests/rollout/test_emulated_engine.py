"""The emulated engine: it keeps the protocol, and its time is that of the tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import UserError
from laminar.rollout.emulation import EmulatedVersions, Emulation
from laminar.rollout.engine import Generation
from laminar.rollout.engines import create_engine
from laminar.rollout.engines.emulated import EmulatedEngine
from laminar.rollout.engines.emulated_batch import EmulatedBatch, Job
from laminar.rollout.engines.emulated_workload import (
    Workload,
    lengths_from_parquet,
    response_tokens,
    sandbox_seconds,
    step_curve,
)
from laminar.rollout.latency import StepCurve
from laminar.trajectory import Sampling
from tests.rollout.answers import Answers, wait_until

CAP = 16384
LONG = Sampling(max_new_tokens=CAP)


def batch_of(
    jobs: list[Job], *, kv: int = 850_000, slots: int = 512, rate: float = 25_000.0, chunk: int = 0
) -> EmulatedBatch:
    batch = EmulatedBatch(step_curve("32B", 4), kv_tokens=kv, max_running=slots, prefill_rate=rate, prefill_chunk=chunk)
    for job in jobs:
        batch.submit(job)
    return batch


def token_by_token(jobs: list[tuple[int, int]], curve: StepCurve, rate: float) -> dict[str, float]:
    """The same batch by a plain loop over steps; everything fits."""
    now = sum(context for context, _ in jobs) / rate
    left = {str(i): length for i, (_, length) in enumerate(jobs)}
    ends = {}
    while left:
        now += float(curve.seconds(len(left)))
        left = {name: tokens - 1 for name, tokens in left.items()}
        ends.update({name: now for name, tokens in left.items() if tokens == 0})
        left = {name: tokens for name, tokens in left.items() if tokens}
    return ends


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), min_size=1, max_size=12),
    ticks=st.lists(st.floats(0.001, 3.0), max_size=20),
)
def test_jumps_give_the_times_of_a_loop_over_tokens(jobs: list[tuple[int, int]], ticks: list[float]) -> None:
    batch = batch_of([Job(str(i), context, length) for i, (context, length) in enumerate(jobs)])
    at, ended = 0.0, []
    for tick in ticks:
        at += tick
        ended += batch.advance(at)
    ended += batch.advance(at + 1e6)
    truth = token_by_token(jobs, step_curve("32B", 4), 25_000.0)
    assert {job.id: time for job, time in ended} == pytest.approx(truth)
    assert batch.kv_used == 0 and batch.decoded == sum(length for _, length in jobs)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    slots=st.integers(1, 16),
    ticks=st.lists(st.floats(0.01, 5.0), max_size=30),
    aborted=st.sets(st.integers(0, 39)),
    chunk=st.sampled_from([0, 7, 512]),
)
def test_cache_and_slots_are_never_exceeded_and_nothing_is_lost(
    lengths: list[int], slots: int, ticks: list[float], aborted: set[int], chunk: int
) -> None:
    tools = [((n // 2, 1.5),) if n > 2 and n % 3 == 0 else () for n in lengths]
    jobs = [Job(str(i), 10, n, tools=tools[i]) for i, n in enumerate(lengths)]
    batch = batch_of(jobs, kv=1000, slots=slots, rate=1e5, chunk=chunk)
    at, ended, taken = 0.0, [], []
    for number, tick in enumerate(ticks):
        at += tick
        ended += batch.advance(at)
        held = sum(10 + (batch.generated(name) or 0) for name in [*batch._decoding, *batch._paused, *batch._filling])
        assert batch.kv_used == held <= 1000 and batch.running <= slots
        if number in aborted and (job := batch.abort(str(number))) is not None:
            taken.append(job.id)
    ended += batch.advance(at + 1e6)
    assert sorted([job.id for job, _ in ended] + taken) == sorted(str(i) for i in range(len(lengths)))
    assert all(job.generated == job.length for job, _ in ended) and batch.kv_used == 0


@settings(max_examples=60, deadline=None)
@given(
    here=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    come=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 200)), min_size=1, max_size=6),
    chunk=st.sampled_from([100, 512, 2000]),
    first=st.floats(0.0, 0.2),
)
def test_a_prefill_beside_others_takes_the_time_of_a_loop_over_steps(
    here: list[int], come: list[tuple[int, int]], chunk: int, first: float
) -> None:
    """Each step carries a chunk, both share one pass over the weights, and who is prefilled decodes from the next."""
    curve, rate = step_curve("32B", 4), 25_000.0
    batch = batch_of([Job(f"h{i}", 1, length) for i, length in enumerate(here)], rate=rate, chunk=chunk)
    ended = batch.advance(first)
    for i, (context, length) in enumerate(come):
        batch.submit(Job(f"c{i}", context, length))
    had = {f"h{i}": batch.generated(f"h{i}") for i in range(len(here))}
    left = {name: here[int(name[1:])] - tokens for name, tokens in had.items() if tokens is not None}
    now, filling = batch.now, {f"c{i}": context for i, (context, _) in enumerate(come)}
    ends = {job.id: at for job, at in ended}
    if not left:
        now += sum(filling.values()) / rate
        left, filling = {f"c{i}": length for i, (_, length) in enumerate(come)}, {}
    while left or filling:
        if not left:
            now += sum(filling.values()) / rate
            left, filling = {name: come[int(name[1:])][1] for name in filling}, {}
        extra = max(0.0, chunk / rate - float(curve.seconds(1))) if filling else 0.0
        now += float(curve.seconds(len(left))) + extra
        left = {name: tokens - 1 for name, tokens in left.items()}
        budget = chunk
        while filling and budget:
            name, tokens = next(iter(filling.items()))
            filling[name] = tokens - min(budget, tokens)
            budget -= min(budget, tokens)
            if not filling[name]:
                del filling[name]
                left[name] = come[int(name[1:])][1]
        ends |= {name: now for name, tokens in left.items() if tokens == 0}
        left = {name: tokens for name, tokens in left.items() if tokens}
    ended += batch.advance(1e6)
    assert {job.id: at for job, at in ended} == pytest.approx(ends)
    assert batch.prefilled == len(here) + sum(context for context, _ in come)


def test_what_a_prefill_costs_others_is_known() -> None:
    """The rule that decides on moves goes by it."""
    step = float(step_curve("32B", 4).seconds(1))
    assert batch_of([]).stall_rate == 25_000
    assert batch_of([], chunk=512).stall_rate == pytest.approx(512 / (512 / 25_000 - step))
    assert batch_of([], chunk=128).stall_rate == float("inf")  # hidden behind the pass over the weights


def test_a_full_cache_puts_the_newest_back_and_prefills_it_again() -> None:
    batch = batch_of([Job(str(i), 10, 300) for i in range(4)], kv=1000)
    ended = batch.advance(1e6)
    assert len(ended) == 4 and batch.preemptions >= 1
    assert batch.prefilled > 40


def test_a_tool_wait_holds_slot_and_cache_but_costs_no_decoding() -> None:
    batch = batch_of([Job("a", 10, 100, tools=((50, 30.0),)), Job("b", 10, 100)], slots=2)
    batch.advance(0.8)
    assert (batch.running, batch.decoding) == (2, 1)
    ends = {job.id: at for job, at in batch.advance(1e6)}
    assert ends["b"] < 3 and 30 < ends["a"] < 33


def test_lengths_are_those_of_the_quantiles_and_the_same_wherever_it_runs() -> None:
    workload = Workload(response_tokens("32B math"), seed=3, group_correlation=0.5)
    lengths = sorted(workload.length(f"g{i}-{j}", CAP) for i in range(200) for j in range(16))
    assert lengths[len(lengths) // 2] == pytest.approx(2824, rel=0.1)
    assert sum(lengths) / len(lengths) == pytest.approx(3325, rel=0.1)
    assert workload.length("g1-2", CAP) == Workload(response_tokens("32B math"), seed=3, group_correlation=0.5).length(
        "g1-2", CAP
    )
    assert workload.length("g1-2", CAP) != Workload(response_tokens("32B math"), seed=4).length("g1-2", CAP)


def test_tool_waits_come_from_the_sandbox_quantiles() -> None:
    workload = Workload(response_tokens("7B tool"), tool_calls=8, tool_seconds=sandbox_seconds())
    tools = [tool for i in range(500) for tool in workload.tools(f"g{i}-0", 1000)]
    seconds = sorted(seconds for _, seconds in tools)
    assert seconds[len(seconds) // 2] == pytest.approx(22, rel=0.2) and seconds[-1] <= 600
    assert max(len(workload.tools(f"g{i}-0", 1000)) for i in range(500)) <= 8


def test_real_lengths_are_taken_from_parquet(tmp_path: Path) -> None:
    path = tmp_path / "lengths.parquet"
    pq.write_table(pa.table({"tokens": [100, 200, 300]}), path)
    assert lengths_from_parquet(str(path)).value(0.5) == 200
    pq.write_table(pa.table({"a": [1], "b": [2]}), path)
    with pytest.raises(UserError, match="expected one named `tokens`"):
        lengths_from_parquet(str(path))


@pytest.mark.parametrize("model", ["33B", "7B"])
def test_unknown_tables_are_named(model: str) -> None:
    with pytest.raises(UserError, match="known:"):
        step_curve(model, 16)
    with pytest.raises(UserError, match="32B math"):
        response_tokens("poetry")


@pytest.fixture
def engine() -> Iterator[EmulatedEngine]:
    made = create_engine("emulated", "", emulation=Emulation(time_scale=2000), kv_tokens=850_000, max_running=64)
    assert isinstance(made, EmulatedEngine)
    made.start()
    made.load(1, {})
    yield made
    made.close()


def submit(engine: EmulatedEngine, answers: Answers, name: str, **options: object) -> None:
    engine.submit(Generation(name, (300,), LONG, **options), answers)  # type: ignore[arg-type]


def test_a_response_is_streamed_once_and_whole(engine: EmulatedEngine, answers: Answers) -> None:
    names = [f"g0-{i}" for i in range(32)]
    for name in names:
        submit(engine, answers, name)
    streamed: dict[str, list[int]] = {name: [] for name in names}

    def collect() -> bool:
        for delta in engine.progress():
            assert delta.start == len(streamed[delta.id])
            streamed[delta.id] += delta.ids
        return len(answers.calls) == len(names)

    wait_until(collect, "all responses")
    for answer in answers.wait(names):
        assert answer.finish_reason == "stop" and sum(answer.ids) == engine.workload.length(answer.id, CAP)
        assert list(answer.ids[: len(streamed[answer.id])]) == streamed[answer.id]


def test_a_response_that_moves_keeps_its_length(engine: EmulatedEngine, answers: Answers) -> None:
    submit(engine, answers, "g1-0")
    wait_until(lambda: bool(engine.progress()), "a token")
    engine.abort("g1-0")
    [half] = answers.wait(["g1-0"])
    assert half.finish_reason == "abort" and 0 < sum(half.ids) < engine.workload.length("g1-0", CAP)
    again = Answers()
    submit(engine, again, "g1-0", prefix_ids=half.ids, prefix_logprobs=half.logprobs)
    [whole] = again.wait(["g1-0"])
    assert sum(whole.ids) == engine.workload.length("g1-0", CAP)
    assert list(whole.ids[: len(half.ids)]) == list(half.ids)
    assert engine.measures()["decoded"] == sum(whole.ids)


def test_weights_are_not_loaded_while_something_runs(engine: EmulatedEngine, answers: Answers) -> None:
    submit(engine, answers, "g2-0")
    with pytest.raises(RuntimeError, match="1 requests are running"):
        engine.load(2, {})


def test_what_can_never_fit_is_refused(engine: EmulatedEngine, answers: Answers) -> None:
    with pytest.raises(ValueError, match="the cache holds 850000"):
        engine.submit(Generation("g", (840_000,), LONG), answers)


def test_closing_ends_what_runs(engine: EmulatedEngine, answers: Answers) -> None:
    submit(engine, answers, "g3-0")
    engine.close()
    assert answers.wait(["g3-0"])[0].finish_reason == "abort" and not engine.alive()


def test_emulated_versions_are_published_by_number(tmp_path: Path) -> None:
    versions = EmulatedVersions(tmp_path / "run")
    assert versions.newest() is None and versions.held() == []
    for version in range(5):
        versions.publish(version)
    assert versions.newest() == 4 and versions.held() == [2, 3, 4]
