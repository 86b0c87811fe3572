"""The table's rules: which groups are ready, and what may happen to a trajectory. Pure: no files, no clock.

The index holds a few facts of each row, never its tokens. What should happen is first returned as a list of
events; the owner writes them down and only then calls ``apply``, so that memory never runs ahead of the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from laminar.experience.facts import LEASED, READY, Event, Group, Life, Row, State

__all__ = ["Index"]

_ALLOWED: Final[dict[State, frozenset[State]]] = {
    "ready": frozenset({"leased", "trained", "evicted"}),
    "leased": frozenset({"ready", "trained"}),
    "trained": frozenset({"ready"}),  # by a rewind only
    "evicted": frozenset(),
}

TOO_FEW_ROWS: Final = "too_few_rows"


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
    >>> index.lease(["g0"])
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
        self._leased: dict[str, int] = {}  # group -> its scored rows; kept by group, as a lease is of many rows
        self._open: set[str] = set()
        self._overdue: dict[str, str] = {}
        self._drops: dict[str, Life] = {}
        self._completed = 0
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def check(self, rows: Iterable[Row]) -> list[Group]:
        """The groups of new rows as they will be with them. ValueError if a row contradicts its group: another
        ``group_size``, or a ``sample`` out of range or there already under another id."""
        return self._joined(rows)

    def add(self, rows: Iterable[Row], groups: Sequence[Group] | None = None) -> None:
        """Take up rows that are on disk, all or none. One whose id is known is ignored.

        Parameters
        ----------
        groups
            What :meth:`check` has just said of the same rows, all of them new; else it is asked: ValueError as there.
        """
        fresh = {row.trajectory_id: row for row in rows if row.trajectory_id not in self.rows}
        groups = self._joined(fresh.values()) if groups is None else groups
        self.rows |= fresh
        self._life |= dict.fromkeys(fresh, READY)
        self._states[READY.state] += len(fresh)
        for name, row in fresh.items():
            if row.drop_reason is not None:
                self._life[name] = life = self._dropped(row.drop_reason)
                self._count(READY, -1)
                self._count(life, 1, dropped=True)
        for group in groups:
            self.groups[group.id] = group
            self._completed += group.completed is not None
            self._refresh(group)

    def _joined(self, rows: Iterable[Row]) -> list[Group]:
        """The groups of new rows as they will be with them."""
        new: dict[str, list[Row]] = {}
        for row in rows:
            new.setdefault(row.group_id, []).append(row)
        groups, completed = [], self._completed
        for name, mine in new.items():
            group = _joined(self.groups.get(name), mine, completed)
            completed += group.completed is not None
            groups.append(group)
        return groups

    def verdicts(self) -> list[Event]:
        """Evictions that the rows themselves call for: complete groups with fewer than two scored rows, and
        rows that came to a group after it was evicted. They come again until they are applied."""
        return [event for name in sorted(self._overdue) for event in self.evict([name], self._overdue[name])]

    def ready(self) -> list[Group]:
        """Groups that may be leased, in the order in which they became complete."""
        return sorted((self.groups[name] for name in self._ready), key=lambda group: group.completed or 0)

    def life(self, trajectory_id: str) -> Life:
        """Where a trajectory stands. KeyError if it never arrived."""
        life = self._life[trajectory_id]
        if life.state == "ready" and self.rows[trajectory_id].group_id in self._leased:
            return LEASED
        return life

    def lease(self, groups: Iterable[str]) -> None:
        """Hand groups out. ValueError if one of them is not ready."""
        names = list(groups)
        if missing := [name for name in names if name not in self._ready]:
            raise ValueError(f"group {missing[0]} is not ready and cannot be leased")
        for name in names:
            self._leased[name] = len(self.groups[name].scored)
            self._ready.discard(name)

    def give_back(self, groups: Iterable[str]) -> None:
        """Make groups that were handed out ready again."""
        for name in groups:
            del self._leased[name]
            self._refresh(self.groups[name])

    def change(self, groups: Iterable[str], life: Life) -> list[Event]:
        """The events that give every scored row of these groups this life."""
        return [Event(row.trajectory_id, life) for name in groups for row in self.groups[name].scored]

    def evict(self, groups: Iterable[str], reason: str) -> list[Event]:
        """The events that evict what is ready of these groups; rows still to come will follow them.

        What is leased stays: its trainer has it. Groups of which nothing arrived are no error.
        """
        life = Life("evicted", reason=reason)
        found = [self.groups[name] for name in groups if name in self.groups]
        rows = [row for group in found for row in group.scored if self.life(row.trajectory_id) is READY]
        return [Event(row.trajectory_id, life) for row in rows]

    def settled(self) -> set[str]:
        """Groups that are done with: given up, or complete with every row trained or dropped."""
        return {name for name, group in self.groups.items() if self._is_settled(group)}

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
            now = self.life(event.trajectory_id)
            if event.life.state not in _ALLOWED[now.state]:
                raise ValueError(f"{event.trajectory_id} is {now.state} and cannot become {event.life.state}")

    def apply(self, events: Sequence[Event]) -> None:
        """Let events happen, all or none. ValueError as in :meth:`allow`."""
        self.allow(events)
        changes: Counter[tuple[Life, int]] = Counter()
        for event in events:
            changes[self._life[event.trajectory_id], -1] += 1
            changes[event.life, 1] += 1
            self._life[event.trajectory_id] = event.life
        for (life, sign), count in changes.items():
            self._count(life, sign * count)
        for name in {self.rows[event.trajectory_id].group_id for event in events}:
            self._leased.pop(name, None)
            self._refresh(self.groups[name])

    def counts(self) -> dict[str, int]:
        """Rows by state, groups by readiness, evicted rows by reason (``dropped_…``: without a reward)."""
        leased = sum(self._leased.values())
        states = {"ready": self._states["ready"] - leased, "leased": leased}
        states |= {state: self._states[state] for state in ("trained", "evicted")}
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
        return head + self._missing() + self._evicted()

    def _missing(self) -> str:
        if not self._open:
            return "and no trajectory of another group has arrived"
        names = sorted(self._open)
        total = sum(self.groups[name].size for name in names)
        missing = total - sum(len(self.groups[name].rows) for name in names)
        span = f"group {names[0]}" if len(names) == 1 else f"groups {names[0]}..{names[-1]}"
        return f"{missing} of {total} trajectories of {span} still to come"

    def _evicted(self) -> str:
        """Which rows were evicted so far and why, as the end of a sentence."""
        found = [f"{count} {reason}" for reason, count in sorted(self._reasons.items()) if count]
        return f" ({', '.join(found)})" if found else ""

    def _count(self, life: Life, by: int, *, dropped: bool = False) -> None:
        self._states[life.state] += by
        if life.state == "evicted":
            self._reasons[f"{'dropped' if dropped else 'evicted'}_{life.reason}"] += by

    def _dropped(self, reason: str) -> Life:
        return self._drops.setdefault(reason, Life("evicted", reason=reason))

    def _is_settled(self, group: Group) -> bool:
        states = {self._life[row.trajectory_id].state for row in group.rows if row.drop_reason is None}
        return "evicted" in states or (group.completed is not None and "ready" not in states)

    def _refresh(self, group: Group) -> None:
        """Put a group in the sets where it belongs now."""
        lives = [self._life[row.trajectory_id] for row in group.rows if row.drop_reason is None]
        states = {life.state for life in lives}
        complete = group.completed is not None
        all_ready = states == {"ready"} and group.id not in self._leased
        _put(self._open, group.id, not complete)
        _put(self._ready, group.id, complete and all_ready and len(lives) >= 2)
        self._overdue.pop(group.id, None)
        if complete and all_ready and len(lives) == 1:
            self._overdue[group.id] = TOO_FEW_ROWS
        elif states >= {"ready", "evicted"}:
            self._overdue[group.id] = next(str(life.reason) for life in lives if life.state == "evicted")


def _joined(group: Group | None, rows: Sequence[Row], completed: int) -> Group:
    """The group with more rows, complete as number ``completed`` if all are there. ValueError if one is none of its."""
    size = rows[0].group_size if group is None else group.size
    samples = {} if group is None else {row.sample: row for row in group.rows}
    for row in rows:
        if row.group_size != size:
            raise ValueError(f"{row.trajectory_id}: group_size is {row.group_size}, its group's is {size}")
        if not 0 <= row.sample < size:
            raise ValueError(f"{row.trajectory_id}: sample is {row.sample} in a group of {size}")
        if samples.setdefault(row.sample, row) is not row:
            raise ValueError(f"{row.trajectory_id}: sample {row.sample} of {row.group_id} is there under another id")
    ordered = tuple(samples[number] for number in sorted(samples))
    return Group(rows[0].group_id, size, ordered, completed if len(ordered) == size else None)


def _put(names: set[str], name: str, inside: bool) -> None:
    """Make ``name`` a member of ``names`` or not."""
    if inside:
        names.add(name)
    else:
        names.discard(name)
