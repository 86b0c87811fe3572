"""The table's rules: which groups are ready, and what may happen to a trajectory. Pure: no files, no clock.

The index holds a few facts of each row, never its tokens. What should happen is first returned as a list of
events; the owner writes them down and only then calls ``apply``, so that memory never runs ahead of the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

__all__ = ["READY", "Event", "Group", "Index", "Life", "Row", "State"]

State = Literal["ready", "leased", "trained", "evicted"]

_ALLOWED: Final[dict[State, frozenset[State]]] = {
    "ready": frozenset({"leased", "trained", "evicted"}),
    "leased": frozenset({"ready", "trained"}),
    "trained": frozenset({"ready"}),  # by a rewind only
    "evicted": frozenset(),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What the rules need to know of a trajectory. ``drop_reason`` is set where it has no reward."""

    trajectory_id: str
    group_id: str
    sample: int
    group_size: int
    weight_version: int
    drop_reason: str | None = None

    @property
    def scored(self) -> bool:
        """Whether it can be trained on."""
        return self.drop_reason is None


@dataclass(frozen=True, slots=True)
class Life:
    """Where a trajectory stands: trained by which ``step`` updating which ``version``, or evicted and why."""

    state: State
    step: int | None = None
    version: int | None = None
    reason: str | None = None


READY: Final = Life("ready")
_TOO_FEW_ROWS: Final = Life("evicted", reason="too_few_rows")


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the life log."""

    trajectory_id: str
    life: Life


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one drawn prompt that arrived so far. ``completed`` numbers complete groups in order."""

    id: str
    size: int
    rows: tuple[Row, ...] = ()
    completed: int | None = None

    @property
    def scored(self) -> list[Row]:
        """Rows that can be trained on, by sample."""
        return sorted((row for row in self.rows if row.scored), key=lambda row: row.sample)

    @property
    def oldest_version(self) -> int:
        """Lowest weight version of its scored rows."""
        return min(row.weight_version for row in self.rows if row.scored)

    @property
    def newest_version(self) -> int:
        """Highest weight version of its scored rows."""
        return max(row.weight_version for row in self.rows if row.scored)


class Index:
    """Every trajectory's facts and life, and which groups are ready.

    A group is complete when its ``group_size`` rows arrived, dropped ones counted. It is ready when it is
    complete, has at least two scored rows (one alone has no advantage) and all of them are ready.

    Example
    -------
    >>> index = Index()
    >>> index.add([Row("g0-0", "g0", 0, 2, weight_version=3)])
    >>> index.ready(), index.waiting_for(1)
    ([], 'waiting for 1 complete group: 0 are complete, 1 of 2 trajectories of group g0 still to come')
    >>> index.add([Row("g0-1", "g0", 1, 2, weight_version=3)])
    >>> [group.id for group in index.ready()]
    ['g0']
    >>> index.apply(index.change(["g0"], Life("leased")))
    >>> index.apply(index.change(["g0"], Life("trained", step=1, version=3)))
    >>> index.ready(), index.counts()["trained"]
    ([], 2)
    >>> index.apply(index.rewind(step=0))
    >>> len(index.ready())
    1
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, Group] = {}
        self._life: dict[str, Life] = {}
        self._ready: set[str] = set()
        self._open: set[str] = set()
        self._overdue: set[str] = set()
        self._completed = 0
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def check(self, rows: Iterable[Row]) -> None:
        """Raise ValueError if a new row contradicts its group: another ``group_size``, or a ``sample`` out of
        range or there already under another id."""
        groups: dict[str, Group] = {}
        for row in rows:
            group = groups.get(row.group_id) or self.groups.get(row.group_id)
            groups[row.group_id] = _joined(group, row)

    def add(self, rows: Iterable[Row]) -> None:
        """Take up rows that are on disk. One whose id is known is ignored. ValueError as in :meth:`check`."""
        for row in rows:
            if row.trajectory_id not in self.rows:
                self._add(row)

    def _add(self, row: Row) -> None:
        group = _joined(self.groups.get(row.group_id), row)
        if len(group.rows) == group.size:
            group = replace(group, completed=self._completed)
            self._completed += 1
        self.rows[row.trajectory_id] = row
        self.groups[group.id] = group
        life = READY if row.scored else Life("evicted", reason=row.drop_reason)
        self._life[row.trajectory_id] = life
        self._count(life, 1, dropped=not row.scored)
        self._refresh(group)

    def verdicts(self) -> list[Event]:
        """Evictions that the rows themselves call for: complete groups with fewer than two scored rows.
        They come again until they are applied."""
        rows = [row for name in sorted(self._overdue) for row in self.groups[name].scored]
        return [Event(row.trajectory_id, _TOO_FEW_ROWS) for row in rows]

    def ready(self) -> list[Group]:
        """Groups that may be leased, in the order in which they became complete."""
        return sorted((self.groups[name] for name in self._ready), key=lambda group: group.completed or 0)

    def life(self, trajectory_id: str) -> Life:
        """Where a trajectory stands. KeyError if it never arrived."""
        return self._life[trajectory_id]

    def change(self, groups: Iterable[str], life: Life) -> list[Event]:
        """The events that give every scored row of these groups this life."""
        return [Event(row.trajectory_id, life) for name in groups for row in self.groups[name].scored]

    def rewind(self, *, step: int) -> list[Event]:
        """The events that make ready again what was trained after ``step``."""
        return [
            Event(name, READY)
            for name, life in self._life.items()
            if life.state == "trained" and life.step is not None and life.step > step
        ]

    def allow(self, events: Iterable[Event]) -> None:
        """Raise ValueError at a change that must never happen, such as leasing a row that was trained."""
        for event in events:
            now = self._life[event.trajectory_id]
            if event.life.state not in _ALLOWED[now.state]:
                raise ValueError(f"{event.trajectory_id} is {now.state} and cannot become {event.life.state}")

    def apply(self, events: Sequence[Event]) -> None:
        """Let events happen, all or none. ValueError as in :meth:`allow`."""
        self.allow(events)
        for event in events:
            self._count(self._life[event.trajectory_id], -1)
            self._life[event.trajectory_id] = event.life
            self._count(event.life, 1)
        touched = {self.rows[event.trajectory_id].group_id for event in events}
        for name in touched:
            self._refresh(self.groups[name])

    def counts(self) -> dict[str, int]:
        """Rows by state, groups by readiness, evicted rows by reason (``dropped_…``: without a reward)."""
        states = {state: self._states[state] for state in ("ready", "leased", "trained", "evicted")}
        groups = {
            "groups": len(self.groups),
            "groups_ready": len(self._ready),
            "groups_open": len(self._open),
        }
        return {"rows": len(self.rows), **states, **groups, **{k: v for k, v in self._reasons.items() if v}}

    def waiting_for(self, groups: int) -> str:
        """One line that names, with counts, what keeps ``groups`` groups from being leased."""
        noun = "complete group" if groups == 1 else "complete groups"
        head = f"waiting for {groups} {noun}: {len(self._ready)} are complete, "
        if not self._open:
            return head + "and no trajectory of another group has arrived"
        names = sorted(self._open)
        total = sum(self.groups[name].size for name in names)
        missing = total - sum(len(self.groups[name].rows) for name in names)
        span = f"group {names[0]}" if len(names) == 1 else f"groups {names[0]}..{names[-1]}"
        return head + f"{missing} of {total} trajectories of {span} still to come"

    def _count(self, life: Life, by: int, *, dropped: bool = False) -> None:
        self._states[life.state] += by
        if life.state == "evicted":
            self._reasons[f"{'dropped' if dropped else 'evicted'}_{life.reason}"] += by

    def _refresh(self, group: Group) -> None:
        """Put a group in the sets where it belongs now."""
        lives = [self._life[row.trajectory_id] for row in group.scored]
        complete, all_ready = group.completed is not None, all(life == READY for life in lives)
        _put(self._open, group.id, not complete)
        _put(self._ready, group.id, complete and all_ready and len(lives) >= 2)
        _put(self._overdue, group.id, complete and all_ready and len(lives) == 1)


def _joined(group: Group | None, row: Row) -> Group:
    """The group with one row more. ValueError if the row is none of its."""
    group = group or Group(row.group_id, row.group_size)
    if row.group_size != group.size:
        raise ValueError(f"{row.trajectory_id}: group_size is {row.group_size}, its group's is {group.size}")
    if not 0 <= row.sample < group.size:
        raise ValueError(f"{row.trajectory_id}: sample is {row.sample} in a group of {group.size}")
    if any(row.sample == other.sample for other in group.rows):
        raise ValueError(f"{row.trajectory_id}: sample {row.sample} of {group.id} is there under another id")
    return replace(group, rows=(*group.rows, row))


def _put(names: set[str], name: str, inside: bool) -> None:
    """Make ``name`` a member of ``names`` or not."""
    if inside:
        names.add(name)
    else:
        names.discard(name)
