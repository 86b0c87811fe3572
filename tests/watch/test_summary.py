"""The numbers that a run ends with."""

from __future__ import annotations

import math

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from laminar.watch.summary import quarter_means, summarise, surviving


def test_a_run_without_a_step_has_no_numbers() -> None:
    result = summarise(None)
    assert (result["steps"], result["trajectories"]) == (0, 0)
    assert {result[name] for name in result.keys() - {"steps", "trajectories"}} == {None}


def test_quarters_of_few_steps_are_one_step_each() -> None:
    assert quarter_means([1.0]) == (1.0, 1.0)
    assert quarter_means([1.0, 2.0, 3.0]) == (1.0, 3.0)
    assert quarter_means([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]) == (1.5, 8.0)


def test_tables_and_lists_give_the_same_numbers() -> None:
    rows = [{"step": n, "reward_mean": n / 4, "rows": 8, "staleness_mean": 1.0} for n in range(1, 5)]
    assert summarise(pa.Table.from_pylist(rows)) == summarise(rows)


def test_staleness_is_weighed_by_rows_and_its_highest_is_a_whole_number() -> None:
    rows = [
        {"step": 1, "rows": 30, "staleness_mean": 0.0, "staleness_max": 0.0},
        {"step": 2, "rows": 10, "staleness_mean": 4.0, "staleness_max": 5.0},
    ]
    result = summarise(rows)
    assert (result["staleness_mean"], result["staleness_max"], result["trajectories"]) == (1.0, 5, 40)


def test_the_trainers_wait_is_a_share_of_seconds_where_they_are_known() -> None:
    seconds = [
        {"step": 1, "wait_seconds": 3.0, "seconds": 1.0},
        {"step": 2, "wait_seconds": 0.0, "seconds": 4.0},
    ]
    assert summarise(seconds)["trainer_wait_fraction"] == 3.0 / 8.0
    shares = [{"step": 1, "trainer_wait_fraction": 0.5}, {"step": 2, "trainer_wait_fraction": 0.0}]
    assert summarise(shares)["trainer_wait_fraction"] == 0.25


def test_held_out_before_and_after_are_the_untrained_policy_and_the_furthest_one() -> None:
    evaluations = [
        {"step": 0, "reward_mean": 0.3, "greedy_accuracy": 0.5},
        {"step": 10, "reward_mean": 0.4, "greedy_accuracy": 0.6},
        {"step": 20, "reward_mean": 0.9, "greedy_accuracy": 0.9},
        {"step": 20, "reward_mean": 0.5, "greedy_accuracy": 0.7},
        {"step": 10, "reward_mean": 0.1},
    ]
    result = summarise([], evaluations)
    assert (result["eval_before"], result["eval_after"]) == (0.3, 0.5)
    assert (result["eval_greedy_before"], result["eval_greedy_after"]) == (0.5, 0.7)


def test_a_run_that_was_only_evaluated_before_has_no_result_after() -> None:
    result = summarise([], [{"step": 0, "reward_mean": 0.3}])
    assert (result["eval_before"], result["eval_after"]) == (0.3, None)


def test_steps_done_again_after_a_resume_count_once() -> None:
    steps = [{"step": n, "rows": 8, "reward_mean": 0.0} for n in (1, 2, 3)]
    steps += [{"step": n, "rows": 8, "reward_mean": 1.0} for n in (3, 4)]
    result = summarise(steps)
    assert (result["steps"], result["trajectories"], result["reward_last_quarter"]) == (4, 32, 1.0)


@given(st.lists(st.integers(1, 30)))
def test_the_surviving_history_grows_by_step_and_ends_with_the_last_row(history: list[int]) -> None:
    kept = surviving([{"step": step, "at": at} for at, step in enumerate(history)])
    steps = [row["step"] for row in kept]
    assert steps == sorted(set(steps))
    assert [row["at"] for row in kept[-1:]] == ([len(history) - 1] if history else [])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_quarter_means_lie_within_the_values(values: list[float]) -> None:
    slack = 1e-6 * (1 + max(abs(value) for value in values))
    for mean in quarter_means(values):
        assert mean is not None
        assert min(values) - slack <= mean <= max(values) + slack


def test_not_a_number_is_left_out_and_never_spoils_a_mean() -> None:
    rows = [{"step": 1, "reward_mean": math.nan, "tokens_per_second": 10.0}, {"step": 2, "reward_mean": 0.5}]
    result = summarise(rows)
    assert (result["reward_first_quarter"], result["tokens_per_second"]) == (0.5, 10.0)


def test_versions_per_trajectory_come_from_the_table_before_the_steps() -> None:
    steps = [{"step": 1, "versions_per_trajectory_max": 1}]
    assert summarise(steps)["versions_per_trajectory_max"] == 1
    assert summarise(steps, versions_per_trajectory_max=2, dropped=3) | {} == {
        **summarise(steps),
        "versions_per_trajectory_max": 2,
        "dropped": 3,
    }
