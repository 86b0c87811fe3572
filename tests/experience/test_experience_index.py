"""The index: readiness by group id, and a life that only goes where it may."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from laminar.experience.facts import Life, Row
from laminar.experience.index import Index


def arrive(index: Index, group: str, size: int, *samples: int, dropped: bool = False) -> None:
    reason = "reward_error" if dropped else None
    index.add([Row(f"{group}-{sample}", group, sample, size, 0, reason) for sample in samples])


def names(index: Index) -> list[str]:
    return [group.id for group in index.ready()]


def test_groups_of_four_three_and_one_are_ready_by_their_ids() -> None:
    """slime #1414: uneven groups were told apart by stride."""
    index = Index()
    arrive(index, "four", 4, 0, 1)
    arrive(index, "three", 3, 2)
    arrive(index, "one", 1, 0)
    arrive(index, "four", 4, 3)
    arrive(index, "three", 3, 0, 1)
    assert names(index) == ["three"]
    arrive(index, "four", 4, 2)
    assert names(index) == ["three", "four"]
    assert [(event.trajectory_id, event.life.reason) for event in index.verdicts()] == [("one-0", "too_few_rows")]


def test_dropped_rows_complete_a_group_and_are_not_trained() -> None:
    index = Index()
    arrive(index, "g", 3, 1, dropped=True)
    arrive(index, "g", 3, 2, 0)
    (ready,) = index.ready()
    assert [row.sample for row in ready.scored] == [0, 2]
    assert index.counts() | {"dropped_reward_error": 1, "evicted": 1} == index.counts()


def test_a_group_with_one_scored_row_left_is_evicted_with_the_reason() -> None:
    index = Index()
    arrive(index, "g", 3, 0, 1, dropped=True)
    arrive(index, "g", 3, 2)
    assert index.ready() == []
    index.apply(index.verdicts())
    assert index.life("g-2") == Life("evicted", reason="too_few_rows")
    assert index.verdicts() == []
    assert index.counts()["evicted_too_few_rows"] == 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row("g-1", "g", 1, 3, 0), "group_size is 3, its group's is 2"),
        (Row("g-2", "g", 2, 2, 0), "sample is 2 in a group of 2"),
        (Row("other", "g", 0, 2, 0), "sample 0 of g is there under another id"),
        (Row("h-0", "h", 0, 0, 0), "sample is 0 in a group of 0"),
    ],
)
def test_a_row_that_contradicts_its_group_is_refused(row: Row, why: str) -> None:
    index = Index()
    arrive(index, "g", 2, 0)
    with pytest.raises(ValueError, match=why):
        index.check([row])


def test_a_contradiction_within_one_batch_is_found_before_it_is_added() -> None:
    with pytest.raises(ValueError, match="group_size is 3, its group's is 2"):
        Index().check([Row("g-0", "g", 0, 2, 0), Row("g-1", "g", 1, 3, 0)])


def test_a_trained_row_cannot_be_leased_unless_rewound() -> None:
    index = Index()
    arrive(index, "g", 2, 0, 1)
    index.apply(index.change(["g"], Life("trained", 5, 4)))
    with pytest.raises(ValueError, match="group g is not ready and cannot be leased"):
        index.lease(["g"])
    assert index.rewind(step=5) == []
    index.apply(index.rewind(step=4))
    index.lease(["g"])
    assert index.life("g-0").state == "leased"


def test_what_is_missing_is_said_by_name_and_count() -> None:
    index = Index()
    for number in range(11):
        arrive(index, f"g{number:06d}", 2, 0, 1)
    arrive(index, "g000016", 8, 0, 1, 2)
    arrive(index, "g000031", 8, 0)
    assert index.waiting_for(16) == (
        "waiting for 16 complete groups: 11 are complete, "
        "12 of 16 trajectories of groups g000016..g000031 still to come"
    )
    assert Index().waiting_for(2).endswith("0 are complete, and no trajectory of another group has arrived")


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, leases, commits, releases and rewinds."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.held: list[str] = []
        self.surviving: dict[str, int] = {}  # group -> step, in the history that a checkpoint remembers
        self.step = 0

    @rule(group=st.integers(0, 5), sample=st.integers(0, 3), dropped=st.booleans())
    def append(self, group: int, sample: int, dropped: bool) -> None:
        size = 1 + group % 4
        arrive(self.index, f"g{group}", size, sample % size, dropped=dropped)
        self.index.apply(self.index.verdicts())

    @precondition(lambda self: self.index.ready())
    @rule()
    def lease(self) -> None:
        group = self.index.ready()[0].id
        assert group not in self.surviving
        self.index.lease([group])
        self.held.append(group)

    @precondition(lambda self: self.held)
    @rule(commit=st.booleans())
    def end(self, commit: bool) -> None:
        group = self.held.pop()
        self.step += commit
        if commit:
            self.index.apply(self.index.change([group], Life("trained", self.step, self.step - 1)))
            self.surviving[group] = self.step
        else:
            self.index.give_back([group])

    @rule(back=st.integers(0, 3))
    def rewind(self, back: int) -> None:
        self.step = max(0, self.step - back)
        self.index.apply(self.index.rewind(step=self.step))
        self.surviving = {group: step for group, step in self.surviving.items() if step <= self.step}

    @invariant()
    def every_row_is_counted_in_one_state(self) -> None:
        counts = self.index.counts()
        assert counts["rows"] == sum(counts[state] for state in ("ready", "leased", "trained", "evicted"))
        assert min(counts.values()) >= 0

    @invariant()
    def exactly_the_surviving_groups_are_trained(self) -> None:
        lives = {name: self.index.life(name) for name in self.index.rows}
        trained = {self.index.rows[name].group_id for name, life in lives.items() if life.state == "trained"}
        assert trained == self.surviving.keys()

    @invariant()
    def ready_groups_are_whole(self) -> None:
        for group in self.index.ready():
            assert len(group.rows) == group.size
            assert len(group.scored) >= 2
            assert {row.group_id for row in group.rows} == {group.id}


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
