"""Properties of the plan: whoever dies and whoever joins, everybody is served once and by somebody who has it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.weights.chain import (
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    Fence,
    Member,
    Plan,
    Root,
    chunk_bytes,
    nearest,
    plan_chain,
    replan,
)
from laminar.weights.layout import TensorSpec
from laminar.weights.shards import pack_shards

NAMES = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


def relays(numbers: list[int]) -> list[Member]:
    """Relays on three hosts."""
    return [Member(f"r{n:02d}", f"10.0.0.{n % 3}", f"tcp://10.0.0.{n % 3}:{n}") for n in numbers]


@given(NAMES, st.data())
def test_a_chain_visits_everybody_once_and_every_host_in_one_go(numbers: list[int], data: st.DataObject) -> None:
    members = relays(numbers)
    root = data.draw(st.sampled_from(members))
    plan = plan_chain(3, 1, members, Root(root.name, 0, 1 << 30))
    assert plan.members[0] == root
    assert sorted(plan.members, key=lambda m: m.name) == sorted(members, key=lambda m: m.name)
    hosts = [member.host for member in plan.members]
    entered = [host for before, host in zip([None, *hosts], hosts, strict=False) if before != host]
    assert len(entered) == len(set(hosts))


@given(NAMES)
def test_a_plan_survives_its_way_as_json(numbers: list[int]) -> None:
    plan = plan_chain(3, 1, relays(numbers), Root(relays(numbers)[0].name, 0, 12345))
    assert Plan.from_dict(plan.to_dict()) == plan


def test_what_is_no_plan_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_dict({"members": [], "colour": "red"})


@given(st.integers(1, 1 << 40), st.integers(1, 4096))
def test_a_chain_of_any_length_starts_less_than_a_twentieth_late_unless_chunks_get_too_small(
    nbytes: int, hops: int
) -> None:
    chunk = chunk_bytes(nbytes, hops)
    assert SMALLEST_CHUNK <= chunk <= LARGEST_CHUNK
    assert chunk % 64 == 0
    assert chunk == SMALLEST_CHUNK or (hops - 1) * chunk <= nbytes / 20


@given(NAMES, st.data())
def test_after_the_root_died_the_one_that_holds_most_feeds_all_who_live(
    numbers: list[int], data: st.DataObject
) -> None:
    members = relays(numbers)
    plan = plan_chain(3, 1, members, Root(members[0].name, 0, 1000))
    living = data.draw(st.lists(st.sampled_from(members), unique=True))
    held = {member.name: data.draw(st.integers(0, 1000)) for member in living}
    trainer = data.draw(st.sampled_from([None, Member("trainer", "10.0.0.0", "")]))
    after = replan(plan, 2, held, trainer)
    if not living or (trainer is None and max(held.values()) < 1000):
        assert after is None
        return
    assert after is not None
    served = [member.name for member in after.members if member.name != "trainer"]
    assert sorted(served) == sorted(held)
    assert held[served[0]] == max(held.values())
    assert after.epoch == 2
    assert (after.members[0].name == "trainer") == (max(held.values()) < 1000)


@given(NAMES, st.integers(0, 40))
def test_a_joiner_is_served_by_its_own_host_if_anybody_there_holds_the_version(numbers: list[int], joins: int) -> None:
    (joiner,) = relays([joins])
    holders = [member for member in relays(numbers) if member.name != joiner.name]
    found = nearest(joiner, holders)
    assert (found is None) == (not holders)
    if found is not None and any(holder.host == joiner.host for holder in holders):
        assert found.host == joiner.host


SIZES = st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=6), min_size=1, max_size=5)


@given(SIZES, st.sampled_from([64, 1024]))
def test_the_parts_of_several_shards_cover_the_buffer_once_and_share_no_chunk(
    sizes: list[list[int]], chunk: int
) -> None:
    specs = [[TensorSpec(f"{i}.{j}", "int8", (n,), n) for j, n in enumerate(own)] for i, own in enumerate(sizes)]
    layout, shards = pack_shards(specs, chunk)
    assert shards[0].start == 0
    assert shards[-1].stop == layout.nbytes
    assert all(left.stop == right.start for left, right in itertools.pairwise(shards))
    assert all(shard.start % chunk == 0 for shard in shards)
    assert len(layout.tensors) == sum(map(len, sizes))
    for shard, own in zip(shards, specs, strict=True):
        part = shard.layout(layout)
        assert {spec.name for spec in part.tensors} == {spec.name for spec in own}
        assert all(layout.by_name[spec.name].offset == spec.offset + shard.start for spec in part.tensors)


FENCES = st.builds(Fence, st.integers(0, 5), st.integers(0, 5))


@given(FENCES, FENCES)
def test_of_two_senders_one_wins_whoever_comes_first(one: Fence, other: Fence) -> None:
    assert one.gives_way_to(other) or other.gives_way_to(one)
    assert (one.gives_way_to(other) and other.gives_way_to(one)) == (one == other)
