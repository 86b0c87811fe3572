"""What the table's rules know of trajectories and groups: a few facts of each, never its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

__all__ = ["FACTS", "LEASED", "READY", "Event", "Group", "Life", "Row", "State"]

State = Literal["ready", "leased", "trained", "evicted"]


class Row(NamedTuple):
    """What the rules need to know of a trajectory: columns of the schema. ``drop_reason`` says why no reward."""

    trajectory_id: str
    group_id: str
    sample: int
    group_size: int
    weight_version: int
    drop_reason: str | None = None
    reward: float | None = None
    finished_at: float = 0.0
    turns: int = 1

    @property
    def scored(self) -> bool:
        """Whether it can be trained on."""
        return self.drop_reason is None


FACTS: Final = list(Row._fields)
"""The columns that the index keeps, in the order of ``Row``'s fields."""


@dataclass(frozen=True, slots=True)
class Life:
    """Where a trajectory stands: trained by which ``step`` updating which ``version``, or evicted and why."""

    state: State
    step: int | None = None
    version: int | None = None
    reason: str | None = None


READY: Final = Life("ready")
LEASED: Final = Life("leased")


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the life log."""

    trajectory_id: str
    life: Life


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one drawn prompt that arrived so far, by sample. ``completed`` numbers complete groups in order.

    ``scored`` are the rows that can be trained on, by sample.
    """

    id: str
    size: int
    rows: tuple[Row, ...] = ()
    completed: int | None = None
    scored: tuple[Row, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scored = tuple([row for row in self.rows if row.drop_reason is None])
        object.__setattr__(self, "scored", self.rows if len(scored) == len(self.rows) else scored)  # mostly no copy

    @property
    def oldest_version(self) -> int:
        """Lowest weight version of its scored rows."""
        return min([row.weight_version for row in self.scored])

    @property
    def newest_version(self) -> int:
        """Highest weight version of its scored rows."""
        return max([row.weight_version for row in self.scored])

    @property
    def finished_at(self) -> float:
        """Unix time in seconds at which its last row was scored."""
        return max(row.finished_at for row in self.rows)

    @property
    def rewards(self) -> list[float]:
        """Rewards of its scored rows, by sample."""
        return [row.reward for row in self.scored if row.reward is not None]
