"""Any order of appends, leases, commits, expiries, evictions, resumes and crashes: what a checkpoint remembers was
trained exactly once, in whole groups, never too stale. A crash may come at any change of any file; only files stay.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from laminar.errors import LaminarError
from laminar.experience.reader import Experience
from laminar.experience.table import ExperienceTable, Lease
from tests.experience.rows import batch, one
from tests.experience.stores import AtOnce, Died, mortal_disk

T = TypeVar("T")
GROUPS = st.integers(0, 11)
"""Those whose samples come one by one; others, from 12 on, come whole."""


def size_of(group: int) -> int:
    return (2, 3, 3, 4, 2, 1)[group % 6]


@dataclass
class Held:
    """What a trainer holds, and since when."""

    lease: Lease
    version: int
    until: float
    known: bool = True  # to the owner; one that was opened since does not know it


class Machine(RuleBasedStateMachine):
    """The table, one trainer that behaves as ours does, and what it must remember."""

    @initialize()
    def begin(self) -> None:
        self.disk = mortal_disk()
        self.now = 0.0
        self.step = self.version = self.checkpoint = 0
        self.groups = 12
        self.held: Held | None = None
        self.rows: dict[str, bool] = {}  # id -> whether it has a reward; of what was acknowledged
        self.trained: dict[str, int] = {}  # id -> step, in the history that survives
        self.gone: set[str] = set()  # groups evicted on request
        self.fresh_from = 0  # the highest version that a lease with a ceiling asked for at least
        self.open()

    def open(self) -> None:
        if self.held is not None:
            self.held.known = False
        self.table = ExperienceTable(
            self.disk.url, compact_after=3, compact_in=AtOnce(), memory_bytes=4000, clock=lambda: self.now
        )

    def surely(self, call: Callable[[], T]) -> T:
        """Ask until there is an answer: the owner may die of it and is then opened again."""
        for _ in range(2):
            try:
                return call()
            except Died:
                self.disk.left = sys.maxsize
                self.open()
        return call()

    # -- what may happen ----------------------------------------------------------------------------------

    @rule(left=st.integers(1, 12), moment=st.sampled_from(["before", "within", "after"]))
    def death_is_near(self, left: int, moment: str) -> None:
        self.disk.left, self.disk.moment = left, moment

    @rule()
    def crash(self) -> None:
        self.surely(self.open)

    def append_groups(self, count: int, dropped: set[int]) -> None:
        numbers = range(self.groups, self.groups + count)
        self.groups += count
        self.append([(number, sample, sample in dropped) for number in numbers for sample in range(size_of(number))])

    @rule(
        fresh=st.integers(0, 2),
        dropped=st.sets(st.integers(0, 3), max_size=1),
        groups=st.integers(1, 2),
        ceiling=st.none() | st.integers(0, 2),
        fate=st.sampled_from(["commits", "commits", "commits late", "loses its lease", "dies"]),
        checkpoint=st.booleans(),
    )
    def rollouts_and_the_trainer_go_on(
        self, fresh: int, dropped: set[int], groups: int, ceiling: int | None, fate: str, checkpoint: bool
    ) -> None:
        """Groups are finished. The trainer leases where it holds nothing; the next time something becomes of that."""
        self.append_groups(fresh, dropped)
        if fate == "dies":
            self.die()
        elif self.held is None:
            self.lease(groups, ceiling)
        elif fate.startswith("commits"):
            self.now = self.held.until + 1.0 if fate == "commits late" else self.now
            self.commit()
            self.checkpoint = self.step if checkpoint else self.checkpoint
        else:
            self.expire()

    @rule(number=GROUPS, sample=st.integers(0, 3), dropped=st.booleans())
    def append_one(self, number: int, sample: int, dropped: bool) -> None:
        self.append([(number, sample % size_of(number), dropped)])

    def append(self, samples: list[tuple[int, int, bool]]) -> None:
        made = {}
        for number, sample, dropped in samples:
            size, name = size_of(number), f"g{number}"
            more = {"drop_reason": "reward_error"} if dropped else {}
            version = max(0, self.version - (number + sample) % 2)  # a group need not be of one version
            made[f"{name}-{sample}"] = one(name, sample, size=size, version=version, **more)
        if made:
            self.surely(lambda: self.table.append(batch(*made.values())))
        for name, row in made.items():
            self.rows.setdefault(name, row["drop_reason"] is None)

    def lease(self, groups: int, ceiling: int | None) -> None:
        lease = self.surely(
            lambda: self.table.lease(
                groups, version=self.version, staleness_ceiling=ceiling, lessee="trainer", seconds=10.0
            )
        )
        if ceiling is not None:
            self.fresh_from = max(self.fresh_from, self.version - ceiling)
        if lease is None:
            return
        self.held = Held(lease, self.version, self.now + 10.0)
        staleness = [self.version - version for version in lease.table["weight_version"].to_pylist()]
        assert min(staleness) >= 0 and max(staleness) <= (sys.maxsize if ceiling is None else ceiling)
        assert len(lease.groups) == groups
        self.is_whole_groups(lease.table)
        assert not self.trained.keys() & set(lease.table["trajectory_id"].to_pylist())
        assert not self.gone & set(lease.groups)

    def is_whole_groups(self, table: pa.Table) -> None:
        """Each group with all its rows that have a reward, and at least two."""
        for group in set(table["group_id"].to_pylist()):
            mine = table.filter(pa.compute.equal(table["group_id"], group))["trajectory_id"].to_pylist()
            assert mine == sorted(name for name, scored in self.rows.items() if scored and name.startswith(f"{group}-"))
            assert len(mine) >= 2

    def commit(self) -> None:
        assert self.held is not None
        held, self.held = self.held, None
        self.step += 1
        self.surely(
            lambda: self.table.commit(held.lease.id, step=self.step, version=held.version, groups=held.lease.groups)
        )
        self.version = held.version + 1
        self.trained |= dict.fromkeys(held.lease.table["trajectory_id"].to_pylist(), self.step)

    def die(self) -> None:
        """Another trainer goes on from the checkpoint; what the first held is no longer its own."""
        self.surely(lambda: self.table.release_all("trainer"))
        if self.held is not None and self.held.known:
            lease = self.held.lease
            with pytest.raises(LaminarError, match="cannot be committed"):
                self.table.commit(lease.id, step=99, version=self.version, groups=lease.groups)
        self.surely(lambda: self.table.rewind(self.checkpoint))
        self.held, self.step = None, self.checkpoint
        self.version += 1
        self.trained = {name: step for name, step in self.trained.items() if step <= self.step}

    def another_takes(self) -> Lease | None:
        return self.surely(
            lambda: self.table.lease(1, version=self.version, staleness_ceiling=None, lessee="other", seconds=10.0)
        )

    @rule()
    def just_before_the_lease_ends_nobody_gets_its_groups(self) -> None:
        if self.held is None:
            return
        self.now = max(self.now, self.held.until - 0.01)
        other = self.another_takes()
        if other is not None and self.held.known:
            assert not set(other.groups) & set(self.held.lease.groups)
        self.surely(lambda: self.table.release_all("other"))

    def expire(self) -> None:
        """The lease's time is up, and another takes a group. If it is of the lease, the first comes too late."""
        assert self.held is not None
        held, self.held = self.held, None
        self.now = held.until
        self.disk.left = sys.maxsize
        other = self.another_takes()
        assert other is not None
        self.is_whole_groups(other.table)
        assert self.table.counts()["leased"] == other.table.num_rows
        if set(other.groups) & set(held.lease.groups):
            with pytest.raises(LaminarError, match="cannot be committed"):
                self.table.commit(held.lease.id, step=99, version=held.version, groups=held.lease.groups)
        self.surely(lambda: self.table.release_all("other"))

    @rule(number=GROUPS | st.integers(12, 24))
    def evict(self, number: int) -> None:
        name = f"g{number}"
        mine = {row for row, scored in self.rows.items() if row.startswith(f"{name}-") and scored}
        evicted = self.surely(lambda: self.table.evict([name], "on_request"))
        if self.held is not None and name in self.held.lease.groups:
            if self.held.known:
                assert evicted == 0
                return
            self.held = None  # its trainer cannot commit it any more
        if mine and not self.trained.keys() & mine:
            self.gone.add(name)

    @rule(number=GROUPS)
    def a_second_owner_comes_and_the_first_is_refused(self, number: int) -> None:
        before = self.table
        self.disk.left = sys.maxsize
        self.open()
        row = one("late", number, size=12, version=self.version)
        with pytest.raises(LaminarError, match="has a new owner"):
            before.append(batch(row))

    # -- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def what_was_acknowledged_is_there_and_only_that_was_trained(self) -> None:
        counts = self.table.counts()
        assert self.rows.keys() <= self.table.trajectory_ids() | {"late"}
        assert counts["rows"] == len(self.rows)
        assert counts["trained"] == len(self.trained)
        assert counts["leased"] == (self.held.lease.table.num_rows if self.held and self.held.known else 0)
        assert counts["rows"] == sum(counts[state] for state in ("ready", "leased", "trained", "evicted"))
        assert min(counts.values()) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.surely(self.open)
        rows = Experience(self.disk.url).query(
            "select trajectory_id, group_id, state, trained_step, trained_version - weight_version as staleness, "
            "evicted_reason, min(weight_version) over (partition by group_id) as oldest from experience"
        )
        seen = {row["trajectory_id"]: row for row in rows.to_pylist()}
        assert max(Counter(rows["trajectory_id"].to_pylist()).values(), default=1) == 1
        assert seen.keys() == self.rows.keys()
        assert {name: row["trained_step"] for name, row in seen.items() if row["state"] == "trained"} == self.trained
        assert all(row["staleness"] >= 0 for row in seen.values() if row["state"] == "trained")
        for name, row in seen.items():
            self.was_evicted_rightly(row, scored=self.rows[name])

    def was_evicted_rightly(self, row: dict[str, Any], *, scored: bool) -> None:
        reason, group = row["evicted_reason"], row["group_id"]
        mine = [scored for name, scored in self.rows.items() if name.startswith(f"{group}-")]
        assert (reason is None) == (row["state"] != "evicted")
        assert (reason == "reward_error") == (not scored)
        assert reason is not None or group not in self.gone
        assert reason is not None or sum(mine) > 1 or len(mine) < size_of(int(group[1:]))
        if reason == "on_request":
            assert group in self.gone
        elif reason == "stale":
            assert row["oldest"] < self.fresh_from
        elif reason == "too_few_rows":
            assert sum(mine) < 2 and len(mine) == size_of(int(group[1:]))
        else:
            assert reason in (None, "reward_error")


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
