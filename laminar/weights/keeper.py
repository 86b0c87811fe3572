"""What the owner of the chains decides: a pure state machine that is told what happens and says what to do.

One version is under way at a time: down one chain, or down one for each shard of the trainer, once all shards have
handed their part over. A version that is published meanwhile waits, and only the newest one waits: a trainer faster
than the links skips versions, but none is given up half-way for a newer one (that could go on for ever). Whoever is
without the newest version when none is under way is served from the nearest holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laminar.weights.chain import Member, Plan, Root, chunk_bytes, nearest, plan_chain, replan

__all__ = ["Keeper", "Send", "StandInSend", "Survey"]


@dataclass(frozen=True, slots=True)
class Send:
    """Have a relay send a plan, as its first member."""

    relay: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class StandInSend:
    """Have the trainer's process on a host send a plan, out of what its relay left."""

    host: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Survey:
    """Ask relays how much they hold of a part of a version, and whether a stand-in could be found on ``host``; then
    call ``Keeper.surveyed``."""

    version: int
    relays: tuple[str, ...]
    host: str
    part: int = 0


Order = Send | StandInSend | Survey


class Keeper:
    """Owns the plans.

    Example
    -------
    >>> keeper = Keeper()
    >>> for name in "abc":
    ...     _ = keeper.join(Member(name, name, ""), None)
    >>> [order] = keeper.published("a", 1, nbytes=1 << 30)
    >>> order.relay, [member.name for member in order.plan.members]
    ('a', ['a', 'b', 'c'])
    >>> keeper.published("a", 2, nbytes=1 << 30), keeper.published("a", 3, nbytes=1 << 30)  # both wait, 2 is skipped
    ([], [])
    >>> [order] = keeper.report("a", "done", version=1, epoch=1)
    >>> order.plan.version, order.plan.epoch
    (3, 2)
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.holders: dict[int, set[str]] = {}
        self.flights: dict[int, Plan] = {}
        """The chain of each part of the version that is under way."""
        self.waiting: tuple[int, tuple[Root, ...]] | None = None
        self.side: dict[str, Plan] = {}
        self.repairs = 0
        self._epoch = 0
        self._nbytes = 0
        self._suspects: dict[str, int] = {}
        self._given_up: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        """Whom the last chain went to, with its version, until they say themselves that they have it: they may do so
        after its root has said that all is done."""
        self._handed_over: dict[int, dict[int, Root]] = {}

    @property
    def behind(self) -> bool:
        """Whether a living relay lacks the newest version."""
        newest = self.newest
        return newest is not None and not set(self.members) <= self.holders[newest]

    @property
    def newest(self) -> int | None:
        """The newest version that a living relay holds whole."""
        return max((version for version, names in self.holders.items() if names), default=None)

    # -- what happens -------------------------------------------------------------------------------------

    def join(self, member: Member, version: int | None, *, nbytes: int = 0) -> list[Order]:
        """A relay has come (back), and can read ``version``."""
        self.members[member.name] = member
        for names in self.holders.values():
            names.discard(member.name)  # what it holds is what it says now
        self._given_up.pop(member.name, None)
        self._reached.pop(member.name, None)
        self._nbytes = self._nbytes or nbytes
        if version is not None:
            self._holds(member.name, version)
        return self._next()

    def leave(self, name: str) -> list[Order]:
        """A relay has gone. In the middle of a chain the others pass it over by themselves; its root is replaced."""
        if self.members.pop(name, None) is None:
            return []
        for names in self.holders.values():
            names.discard(name)
        self.side = {to: plan for to, plan in self.side.items() if name not in (to, plan.members[0].name)}
        if self.waiting is not None and name in (root.name for root in self.waiting[1]):
            self.waiting = None
        for roots in self._handed_over.values():
            for part in [part for part, root in roots.items() if root.name == name]:
                del roots[part]
        lost = [plan for plan in self.flights.values() if plan.members[0].name == name]
        return [self._survey(plan) for plan in lost] if lost else self._next()

    def published(self, name: str, version: int, *, nbytes: int) -> list[Order]:
        """A relay has a new version from its trainer."""
        self._nbytes = nbytes
        self._holds(name, version)
        self.waiting = (version, (Root(name, 0, nbytes),))
        return self._next()

    def handed_over(self, version: int, root: Root, *, nbytes: int) -> list[Order]:
        """A relay has one part of a new version from a shard of its trainer. It goes on once all parts are there.

        Example
        -------
        >>> keeper = Keeper()
        >>> for name in "abc":
        ...     _ = keeper.join(Member(name, name, ""), None)
        >>> keeper.handed_over(1, Root("a", 0, 64, 0, 2), nbytes=100)
        []
        >>> orders = keeper.handed_over(1, Root("b", 64, 100, 1, 2), nbytes=100)
        >>> [(order.relay, order.plan.start, order.plan.stop) for order in orders]
        [('a', 0, 64), ('b', 64, 100)]
        """
        self._nbytes = nbytes
        roots = self._handed_over.setdefault(version, {})
        roots[root.part] = root
        if len(roots) < root.parts:
            return []
        for old in [it for it in self._handed_over if it <= version]:
            del self._handed_over[old]
        self.waiting = (version, tuple(roots[part] for part in sorted(roots)))
        return self._next()

    def report(self, name: str, what: str, *, version: int, epoch: int, member: str = "") -> list[Order]:
        """What a relay says of a chain (``forward.Report``), of ``member`` where it is about another one.

        Example
        -------
        >>> keeper = Keeper()
        >>> for name in "abc":
        ...     _ = keeper.join(Member(name, name, ""), None)
        >>> _ = keeper.published("a", 1, nbytes=1 << 30)
        >>> keeper.report("a", "done", version=1, epoch=1)  # b and c will say that they have it
        []
        >>> [order] = keeper.report("b", "lost", version=1, epoch=1, member="c")  # c will not
        >>> [member.name for member in order.plan.members]
        ['a', 'c']
        """
        rooted = [plan for plan in self.flights.values() if plan.epoch == epoch and plan.members[0].name == name]
        if what == "promoted":
            self._holds(name, version)
            if version >= self._reached.get(name, version):
                self._reached.pop(name, None)
        elif what == "lost":
            self.repairs += 1
            self._reached.pop(member, None)
        elif what == "starving":
            return self._starving(name, version)
        if what in ("done", "failed", "skipped"):
            self._side_ended(name, what, version, epoch)
            for plan in rooted:
                if what != "done":
                    return [self._survey(plan)]
                del self.flights[plan.part]
        return self._next()

    def surveyed(self, version: int, held: Mapping[str, int], stand_in: Member | None, *, part: int = 0) -> list[Order]:
        """The answer to ``Survey``: bytes held by those that answered, and who could send for the dead root."""
        flight = self.flights.get(part)
        if flight is None or flight.version != version:
            return []
        self._epoch += 1
        self.repairs += 1
        living = {name: n for name, n in held.items() if name in self.members}
        after = replan(flight, self._epoch, living, stand_in if flight.parts == 1 else None)
        if after is None:
            # Nobody can complete it. Who comes back with it serves the others; of a version in parts the rest is
            # worth nothing without this one.
            self.flights = {}
            self._reached.clear()
            return self._next()
        self.flights[part] = after
        self._reached = {it.name: version for it in after.members if it.name in self._reached}
        root = after.members[0]
        return [Send(root.name, after)] if root.name in self.members else [StandInSend(root.host, after)]

    def stuck(self) -> list[Order]:
        """Nothing has moved for long: ask everybody what they hold, and plan anew; try again whom nobody reached."""
        self.side.clear()
        self._given_up.clear()
        self._reached.clear()
        return [self._survey(plan) for plan in self.flights.values()] if self.flights else self._next()

    # -- what to do ---------------------------------------------------------------------------------------

    def _next(self) -> list[Order]:
        if self.flights:
            return []
        if self.waiting is not None:
            version, roots = self.waiting
            self.waiting = None
            if len(self.members) > 1 and all(root.name in self.members for root in roots):
                for root in roots:
                    self._epoch += 1
                    self.flights[root.part] = plan_chain(version, self._epoch, self.members.values(), root)
                self._reached = dict.fromkeys(self.members, version)
                return [Send(plan.members[0].name, plan) for plan in self.flights.values()]
        return self._mend()

    def _mend(self) -> list[Order]:
        """Serve whoever is behind, each from its nearest holder."""
        newest = self.newest
        if newest is None or not self._nbytes:
            return []
        holders = [self.members[name] for name in sorted(self.holders[newest])]
        orders: list[Order] = []
        for member in self.members.values():
            if member.name in self.holders[newest] or member.name in self.side:
                continue
            if member.name in self._reached or self._given_up.get(member.name) == newest:
                continue
            serving: dict[str, int] = {}
            for plan in self.side.values():
                serving[plan.members[0].name] = serving.get(plan.members[0].name, 0) + 1
            holder = nearest(member, holders, serving)
            if holder is not None and not serving.get(holder.name):  # one at a time: the next at its report
                self._epoch += 1
                chunk = chunk_bytes(self._nbytes, 1)
                plan = Plan(newest, self._epoch, (holder, member), chunk, 0, self._nbytes)
                self.side[member.name] = plan
                orders.append(Send(holder.name, plan))
        return orders

    def _side_ended(self, holder: str, what: str, version: int, epoch: int) -> None:
        """A holder has served somebody, or could not: neither is tried again at once."""
        for name in [to for to, plan in self.side.items() if plan.epoch == epoch]:
            del self.side[name]
            if what != "done":
                self.holders.get(version, set()).discard(holder)
            elif name not in self.holders.get(version, set()):
                self._given_up[name] = version

    def _survey(self, plan: Plan) -> Survey:
        relays = tuple(member.name for member in plan.members if member.name in self.members)
        return Survey(plan.version, relays, plan.members[0].host, plan.part)

    def _starving(self, name: str, version: int) -> list[Order]:
        """The first in a chain gets nothing, twice in a row: its root is frozen, and nobody stands before it."""
        first = [plan for plan in self.flights.values() if len(plan.members) > 1 and plan.members[1].name == name]
        if not first or first[0].version != version:
            return []
        self._suspects[name] = self._suspects.get(name, 0) + 1
        if self._suspects[name] < 2:
            return []
        self._suspects.clear()
        return [self._survey(plan) for plan in first]

    def _holds(self, name: str, version: int) -> None:
        self._suspects.clear()
        self.holders.setdefault(version, set()).add(name)
        for old in [it for it in self.holders if it < version - 8]:
            del self.holders[old]
