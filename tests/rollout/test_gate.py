"""The replica's gate: one version at a time, in order, nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.rollout.gate import Want, decide

wants = st.builds(Want, at_least=st.integers(0, 6), exactly=st.none() | st.integers(0, 6))


@given(
    st.lists(wants, max_size=6),
    st.none() | st.integers(0, 6),
    st.integers(0, 3),
    st.lists(st.integers(0, 6), max_size=3, unique=True),
)
def test_nothing_is_admitted_on_a_version_it_does_not_accept_and_nothing_is_loaded_while_one_runs(
    queue: list[Want], loaded: int | None, running: int, held: list[int]
) -> None:
    newest = max(held, default=None)
    decision = decide(queue, loaded=loaded, running=running, newest=newest, held=held)
    assert all(want.accepts(loaded) for want in queue[: decision.admit])
    if running:
        assert decision.load is None and not decision.gone
    if decision.load is not None:
        assert decision.load in held and decision.load != loaded and decision.admit == 0


@given(st.lists(wants, min_size=1, max_size=8), st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True))
def test_an_empty_replica_serves_the_whole_queue_in_order(queue: list[Want], held: list[int]) -> None:
    newest, loaded, served = max(held), None, 0
    left = list(queue)
    for _ in range(4 * len(queue)):
        decision = decide(left, loaded=loaded, running=0, newest=newest, held=held)
        if decision.gone:
            left.pop(0)
        elif decision.load is not None:
            loaded = decision.load
        elif decision.admit:
            served += decision.admit
            left = left[decision.admit :]
        else:
            break
    assert not left or (left[0].exactly is None and left[0].at_least > newest)


def test_fresh_work_takes_the_newest_version_only_when_nothing_runs() -> None:
    held = [3, 4]
    assert decide([Want()], loaded=3, running=1, newest=4, held=held).admit == 1
    assert decide([Want()], loaded=3, running=0, newest=4, held=held).load == 4


def test_one_that_needs_another_version_holds_back_those_behind_it() -> None:
    queue = [Want(), Want(at_least=4), Want()]
    assert decide(queue, loaded=3, running=1, newest=4, held=[3, 4]).admit == 1
