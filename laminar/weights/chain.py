"""Who sends a version to whom: pure planning of a chain of relays. No I/O, no clock.

A chain is a list; each member forwards to the next that answers. A plan travels with the bytes, so a member
knows all that stand behind it and repairs the chain without asking. Plans carry an epoch: what an older plan
still sends is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Fence", "Member", "Plan", "Root", "chunk_bytes", "most", "nearest", "order", "plan_chain", "replan"]

SMALLEST_CHUNK = 256 << 10
LARGEST_CHUNK = 16 << 20
FILL_SHARE = 20
"""A chain of n hops starts ``n - 1`` chunks late; the rule keeps that under one part in so many."""


@dataclass(frozen=True, slots=True)
class Member:
    """A relay as the others see it. ``host`` groups relays that share a machine (and their names sort as the
    hosts stand in the racks); ``address`` is where its data plane listens, as ``tcp://10.0.0.7:4711``."""

    name: str
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Which of two senders counts: the later plan, and of one plan the one that stands further ahead.

    A member that was skipped while it stood still stands *behind* the one that skipped it, so it cannot take
    its successor back.

    Example
    -------
    >>> Fence(epoch=2, position=3).gives_way_to(Fence(epoch=2, position=1))  # 2 was skipped
    True
    >>> Fence(epoch=2, position=1).gives_way_to(Fence(epoch=2, position=2))  # the skipped one woke up
    False
    >>> Fence(epoch=2, position=1).gives_way_to(Fence(epoch=3, position=7))
    True
    """

    epoch: int
    position: int

    def gives_way_to(self, other: Fence) -> bool:
        """Whether ``other`` may take over from this sender. The same one again (a new connection) may."""
        return (other.epoch, -other.position) >= (self.epoch, -self.position)


@dataclass(frozen=True, slots=True)
class Plan:
    """One version's way down one chain. ``members[0]`` sends; ``start`` and ``stop`` bound the bytes of the flat
    buffer that this chain carries (several roots: a range each), ``part`` numbers the ranges."""

    version: int
    epoch: int
    members: tuple[Member, ...]
    chunk: int
    start: int
    stop: int
    part: int = 0
    parts: int = 1

    def behind(self, position: int) -> tuple[tuple[int, Member], ...]:
        """The members behind a position, nearest first, each with its own position."""
        return tuple(enumerate(self.members))[position + 1 :]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for Dask's messages."""
        return asdict(self) | {"members": [asdict(member) for member in self.members]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_dict``. ``ValueError`` where the values make no plan."""
        try:
            return cls(**{**values, "members": tuple(Member(**member) for member in values["members"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {type(error).__name__}: {error}") from error


def chunk_bytes(nbytes: int, hops: int) -> int:
    """Bytes of one piece in flight: small enough that the last relay starts early, large enough to cost nothing.

    ``T = S/B * (1 + (hops - 1) / k)`` for k chunks (the paper's model, 4.2, without its start-up term, which a
    stream with several chunks in flight does not pay a chunk). So ``S / (20 (hops - 1))`` keeps the growth over
    one hop below 5 %, within 256 KiB and 16 MiB.

    Example
    -------
    >>> [chunk_bytes(128 << 20, hops) >> 10 for hops in (1, 2, 8)], chunk_bytes(1 << 30, 8) >> 10
    ([6553, 6553, 936], 7489)
    """
    piece = nbytes // (FILL_SHARE * max(1, hops - 1))
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, piece)) // 64 * 64


def order(members: Iterable[Member], root: str) -> list[Member]:
    """The root, its own host's relays, then host after host: each machine's link is entered and left once.

    Example
    -------
    >>> relays = [Member("c", "h2", ""), Member("a", "h1", ""), Member("b", "h2", ""), Member("d", "h1", "")]
    >>> [member.name for member in order(relays, "b")]
    ['b', 'c', 'a', 'd']
    """
    members = list(members)
    home = next(member.host for member in members if member.name == root)
    return sorted(members, key=lambda member: (member.name != root, member.host != home, member.host, member.name))


def most(held: Mapping[str, int]) -> str:
    """The relay that holds the most bytes of a version; the first by name where several do.

    Example
    -------
    >>> most({"c": 7, "b": 9, "a": 9})
    'a'
    """
    return min(held, key=lambda name: (-held[name], name))


@dataclass(frozen=True, slots=True)
class Root:
    """A relay that has bytes ``start`` to ``stop`` of a version from its trainer, as part ``part`` of ``parts``."""

    name: str
    start: int
    stop: int
    part: int = 0
    parts: int = 1


def plan_chain(version: int, epoch: int, members: Iterable[Member], root: Root) -> Plan:
    """One chain from a relay that holds a version, or a part of one, to all others.

    Example
    -------
    >>> relays = [Member(name, name, "") for name in "abc"]
    >>> roots = [Root("a", 0, 64 << 20, 0, 2), Root("c", 64 << 20, 128 << 20, 1, 2)]
    >>> [[member.name for member in plan_chain(7, 1, relays, root).members] for root in roots]
    [['a', 'b', 'c'], ['c', 'a', 'b']]
    """
    ordered = tuple(order(members, root.name))
    chunk = chunk_bytes(root.stop - root.start, len(ordered) - 1)
    return Plan(version, epoch, ordered, chunk, root.start, root.stop, root.part, root.parts)


def replan(plan: Plan, epoch: int, held: Mapping[str, int], source: Member | None = None) -> Plan | None:
    """The chain that goes on when the root of ``plan`` is lost.

    Parameters
    ----------
    held
        Bytes of the version that each living relay holds, by name. Nothing is sent twice: a relay is given
        what it lacks.
    source
        Somebody outside the chain who can send what no relay holds: the trainer's own process.

    Returns
    -------
    The one that holds most first (behind ``source``), the others as they stood. None where nobody can complete
    the version.

    Example
    -------
    >>> relays = tuple(Member(name, name, "") for name in "abc")
    >>> before = Plan(4, 1, relays, chunk=64, start=0, stop=640)
    >>> [m.name for m in replan(before, 2, {"b": 64, "c": 640}).members]
    ['c', 'b']
    >>> replan(before, 2, {"b": 128, "c": 64}) is None
    True
    >>> [m.name for m in replan(before, 2, {"b": 128, "c": 64}, Member("trainer", "a", "")).members]
    ['trainer', 'b', 'c']
    """
    living = [member for member in plan.members if member.name in held]
    if not living:
        return None
    first = most({member.name: held[member.name] for member in living})
    whole = held[first] >= plan.stop - plan.start
    if not whole and source is None:
        return None
    chain = sorted(living, key=lambda member: member.name != first)
    if not whole and source is not None:
        chain = [source, *(member for member in chain if member.name != source.name)]
    return Plan(plan.version, epoch, tuple(chain), plan.chunk, plan.start, plan.stop, plan.part, plan.parts)


def nearest(joiner: Member, holders: Sequence[Member], serving: Mapping[str, int] | None = None) -> Member | None:
    """The relay that a late joiner fetches from: its own host's, else the one whose host name has the most
    leading parts in common, else the one that serves the fewest just now.

    Example
    -------
    >>> holders = [Member("a", "10.0.1.7", ""), Member("b", "10.0.2.9", "")]
    >>> nearest(Member("j", "10.0.2.4", ""), holders).name
    'b'
    >>> nearest(Member("j", "10.9.9.9", ""), holders, {"a": 1}).name
    'b'
    """
    serving = serving or {}
    others = [holder for holder in holders if holder.name != joiner.name]
    if not others:
        return None
    return min(others, key=lambda it: (-_in_common(it.host, joiner.host), serving.get(it.name, 0), it.name))


def _in_common(one: str, other: str) -> int:
    count = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            return count
        count += 1
    return count + 1
