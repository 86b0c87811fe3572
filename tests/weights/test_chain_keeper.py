"""Whatever joins, dies and is reported in whatever order: in the end every living relay has the newest version."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.weights.chain import Member, Root
from laminar.weights.keeper import Keeper, Order, Send, StandInSend, Survey

NBYTES = 1 << 20
TRAINER = Member("trainer", "h0", "")


def relay(number: int) -> Member:
    return Member(f"r{number}", f"h{number}", "")


class World:
    """Carries orders out, perfectly or, where a relay has died, by what then happens."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.alive: set[str] = set()
        self.has: dict[str, set[int]] = {}
        self.orders: list[Order] = []
        self.left: set[int] = set()
        """Versions in the memory that the trainer's relay left, dead or not."""

    def join(self, number: int) -> None:
        name = relay(number).name
        if name in self.alive:
            return
        self.alive.add(name)
        held = self.left if number == 0 else set()
        self.has[name] = set(held)
        self.orders += self.keeper.join(relay(number), max(held, default=None), nbytes=NBYTES)

    def die(self, number: int) -> None:
        name = relay(number).name
        if name in self.alive:
            self.alive.discard(name)
            self.orders += self.keeper.leave(name)

    def publish(self, version: int) -> None:
        self.left.add(version)
        if "r0" in self.alive:
            self.has["r0"].add(version)
            self.orders += self.keeper.published("r0", version, nbytes=NBYTES)

    def carry_out(self) -> None:
        """Follow one order, the oldest."""
        if not self.orders:
            return
        order = self.orders.pop(0)
        if isinstance(order, Survey):
            held = {name: NBYTES * (order.version in self.has[name]) for name in order.relays if name in self.alive}
            stand_in = TRAINER if order.version in self.left else None
            self.orders += self.keeper.surveyed(order.version, held, stand_in)
            return
        assert isinstance(order, Send | StandInSend)
        plan = order.plan
        root = plan.members[0].name
        version = plan.version
        if isinstance(order, Send) and (root not in self.alive or version not in self.has[root]):
            self.orders += self.keeper.report(root, "failed", version=version, epoch=plan.epoch)
            return
        for member in plan.members[1:]:
            if member.name not in self.alive:
                self.orders += self.keeper.report(root, "lost", version=version, epoch=plan.epoch, member=member.name)
            elif version >= max(self.has[member.name], default=-1):
                self.has[member.name].add(version)
                self.orders += self.keeper.report(member.name, "promoted", version=version, epoch=plan.epoch)
        self.orders += self.keeper.report(root, "done", version=version, epoch=plan.epoch)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 4)),
        st.tuples(st.just("die"), st.integers(0, 4)),
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("carry out"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_in_the_end_every_living_relay_has_the_newest_version_that_one_of_them_has(
    events: list[tuple[str, int]],
) -> None:
    world, version = World(), 0
    for what, number in events:
        if what == "join":
            world.join(number)
        elif what == "die":
            world.die(number)
        elif what == "publish":
            world.publish(version)
            version += 1
        else:
            world.carry_out()
    for _ in range(200):
        world.carry_out()
    assert not world.orders, "it goes on for ever"
    held = {name: world.has[name] for name in world.alive}
    newest = max((max(versions) for versions in held.values() if versions), default=None)
    if newest is not None:
        assert all(newest in versions for versions in held.values()), held
    assert not world.keeper.flights


def test_who_got_an_older_version_by_a_chain_is_served_what_a_relay_came_back_with() -> None:
    keeper = Keeper()
    for number in range(2):
        keeper.join(relay(number), None)
    [order] = keeper.published("r0", 0, nbytes=NBYTES)
    assert keeper.published("r0", 1, nbytes=NBYTES) == []
    keeper.leave("r0")  # the chain still ends well: r0 had sent all of version 0
    keeper.join(relay(0), 1)
    assert keeper.report("r1", "promoted", version=0, epoch=order.plan.epoch) == []
    [serve] = keeper.report("r0", "done", version=0, epoch=order.plan.epoch)
    assert (serve.plan.version, [member.name for member in serve.plan.members]) == (1, ["r0", "r1"])


def test_the_first_in_a_chain_that_starves_twice_has_its_frozen_root_replaced() -> None:
    keeper = Keeper()
    for number in range(3):
        keeper.join(relay(number), None)
    [order] = keeper.published("r0", 1, nbytes=NBYTES)
    first = order.plan.members[1].name
    assert keeper.report("r2" if first == "r1" else "r1", "starving", version=1, epoch=1) == []
    assert keeper.report(first, "starving", version=1, epoch=1) == []
    [survey] = keeper.report(first, "starving", version=1, epoch=1)
    assert survey == Survey(1, tuple(member.name for member in order.plan.members), "h0")
    [after] = keeper.surveyed(1, {"r1": 10, "r2": 0}, TRAINER)
    assert [member.name for member in after.plan.members] == ["trainer", "r1", "r2"]


def in_halves(keeper: Keeper, version: int) -> list[Order]:
    """The trainer's two shards, beside r0 and r1, hand a version over."""
    half = NBYTES // 2
    assert keeper.handed_over(version, Root("r1", half, NBYTES, 1, 2), nbytes=NBYTES) == []
    return keeper.handed_over(version, Root("r0", 0, half, 0, 2), nbytes=NBYTES)


def with_relays(count: int) -> Keeper:
    keeper = Keeper()
    for number in range(count):
        keeper.join(relay(number), None)
    return keeper


def test_each_shard_has_a_chain_to_all_others_and_a_newer_version_waits_for_both() -> None:
    keeper = with_relays(3)
    first, second = in_halves(keeper, 1)
    assert [member.name for member in first.plan.members] == ["r0", "r1", "r2"]
    assert [member.name for member in second.plan.members] == ["r1", "r0", "r2"]
    assert (first.plan.stop, second.plan.start) == (NBYTES // 2, NBYTES // 2)
    assert in_halves(keeper, 2) == []
    assert in_halves(keeper, 3) == []
    for number in range(3):
        keeper.report(f"r{number}", "promoted", version=1, epoch=first.plan.epoch)
    assert keeper.newest == 1
    assert keeper.report("r0", "done", version=1, epoch=first.plan.epoch) == []
    orders = keeper.report("r1", "done", version=1, epoch=second.plan.epoch)
    assert [order.plan.version for order in orders] == [3, 3]


def test_a_part_whose_root_died_goes_on_from_who_has_all_of_it() -> None:
    keeper = with_relays(4)
    first, _ = in_halves(keeper, 1)
    [survey] = keeper.leave("r1")
    assert survey == Survey(1, ("r0", "r2", "r3"), "h1", 1)
    [after] = keeper.surveyed(1, {"r0": 0, "r2": NBYTES // 2, "r3": 10}, TRAINER, part=1)
    assert [member.name for member in after.plan.members] == ["r2", "r0", "r3"]
    assert (after.plan.part, after.plan.start, after.plan.parts) == (1, NBYTES // 2, 2)
    assert keeper.flights[0] is first.plan


def test_a_version_of_which_nobody_has_a_whole_part_is_left_out_and_the_next_one_goes() -> None:
    keeper = with_relays(3)
    in_halves(keeper, 1)
    [survey] = keeper.leave("r1")
    assert keeper.surveyed(1, {"r0": 0, "r2": 10}, TRAINER, part=survey.part) == []
    assert keeper.newest is None
    keeper.join(relay(1), None)
    assert [order.plan.version for order in in_halves(keeper, 2)] == [2, 2]


def test_a_part_handed_over_to_a_relay_that_then_died_does_not_count() -> None:
    keeper = with_relays(3)
    keeper.handed_over(1, Root("r1", 64, NBYTES, 1, 2), nbytes=NBYTES)
    keeper.leave("r1")
    assert keeper.handed_over(1, Root("r0", 0, 64, 0, 2), nbytes=NBYTES) == []
    keeper.join(relay(1), None)
    assert len(keeper.handed_over(1, Root("r1", 64, NBYTES, 1, 2), nbytes=NBYTES)) == 2
