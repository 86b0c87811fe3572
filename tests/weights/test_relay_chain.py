"""Chains of real relay processes: whoever is killed or frozen in the middle, the others end with the right bytes."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from laminar.bench.relays import RelayProcess, bytes_layout, chain_of, relay_processes
from laminar.weights.chain import Member, Plan, replan
from laminar.weights.transport import installed

SIZE = 48 << 20
LAYOUT = bytes_layout(SIZE)
CHUNK = 1 << 20
PATIENCE = 10.0
"""Progress deadline where no relay is frozen, in seconds: one that only waits for a core on a busy machine is not."""
FROZEN = 3.0
"""The same where one is."""

pytestmark = pytest.mark.parametrize("transport", installed())


def prepared(relays: Sequence[RelayProcess]) -> str:
    """The relays with their memory taken and version 1 on the first; its digest."""
    for relay in relays:
        relay.call("prepare", LAYOUT)
    return str(relays[0].call("publish", 1))


def of_version(version: int):
    return lambda report: report.version == version


def all_have(relays: Sequence[RelayProcess], version: int, digest: str) -> None:
    for relay in relays:
        relay.wait_for("promoted", where=of_version(version))
        assert relay.call("proven", version) == digest


def test_every_relay_has_every_version_and_connections_stay_open(transport: str) -> None:
    with relay_processes(4, transport, progress_deadline=PATIENCE) as (relays, members):
        digests = {1: prepared(relays)}
        for version in (1, 2, 3):
            if version not in digests:
                digests[version] = relays[0].call("publish", version)
            relays[0].call("send", chain_of(members, version, SIZE, chunk=CHUNK))
            all_have(relays[1:], version, digests[version])
            relays[0].wait_for("done", where=of_version(version))
        status = relays[1].call("status")
        assert (status.bytes_in, status.bytes_out, status.position, status.repairs) == (3 * SIZE, 3 * SIZE, 1, 0)
        assert relays[3].call("status").bytes_out == 0


def test_a_relay_that_knows_no_layout_takes_the_one_it_is_sent(transport: str) -> None:
    with relay_processes(2, transport, progress_deadline=PATIENCE) as (relays, members):
        digest = prepared(relays[:1])
        relays[0].call("send", chain_of(members, 1, SIZE))
        all_have(relays[1:], 1, digest)


def kill_in_the_middle(
    transport: str, victims: Sequence[int], number: int, *, count: int = 4, patience: float = PATIENCE
) -> list[float]:
    """Kill or freeze relays while all receive; milliseconds until a relay behind them got bytes again."""
    with relay_processes(count + 1, transport, progress_deadline=patience) as (relays, members):
        trainer, relays, members = relays[-1], relays[:-1], members[:-1]
        digest = prepared(relays)
        plan = chain_of(members, 1, SIZE, chunk=CHUNK)
        relays[0].call("send", plan)
        relays[-1].wait_for("fed")
        at = [relays[victim].signal(number) for victim in victims]
        root = relays[0]
        living = [relay for index, relay in enumerate(relays) if index not in victims]
        if 0 in victims:
            after = next_plan(plan, living, trainer, members[0])
            if after.members[0].name == trainer.name:
                root = trainer
                root.call("stand_in", relays[0].setting.root, after)
            else:
                root = next(relay for relay in living if relay.name == after.members[0].name)
                root.call("send", after)
        all_have([relay for relay in living if relay is not relays[0]], 1, digest)
        root.wait_for("done", where=lambda report: report.epoch == (2 if 0 in victims else 1))
        return repairs(living, at)


def next_plan(plan: Plan, living: Sequence[RelayProcess], trainer: RelayProcess, dead: Member) -> Plan:
    held = {relay.name: relay.call("held", 1) for relay in living}
    after = replan(plan, 2, held, Member(trainer.name, dead.host, ""))
    assert after is not None
    return after


def repairs(living: Sequence[RelayProcess], killed: Sequence[float]) -> list[float]:
    fed = [
        report.at for relay in living for report in relay.reports if report.what == "fed" and report.at > min(killed)
    ]
    return [(min(fed) - min(killed)) * 1000] if fed else []


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_when_a_relay_is_killed_in_the_middle_all_others_have_the_version(transport: str, victim: int) -> None:
    kill_in_the_middle(transport, [victim], signal.SIGKILL)


def test_two_relays_that_die_at_once_are_passed_over_together(transport: str) -> None:
    kill_in_the_middle(transport, [1, 2], signal.SIGKILL)


def test_a_frozen_relay_is_passed_over_after_the_progress_deadline(transport: str) -> None:
    kill_in_the_middle(transport, [2], signal.SIGSTOP, patience=FROZEN)


def test_a_relay_that_wakes_up_leaves_its_successors_to_who_took_its_place(transport: str) -> None:
    with relay_processes(5, transport, progress_deadline=FROZEN) as (relays, members):
        digest = prepared(relays)
        plan = chain_of(members, 1, SIZE, chunk=CHUNK)
        relays[0].call("send", plan)
        relays[-1].wait_for("fed")
        relays[2].signal(signal.SIGSTOP)
        all_have([relays[1], relays[3], relays[4]], 1, digest)
        relays[0].wait_for("done")
        relays[2].signal(signal.SIGCONT)
        relays[0].call("send", Plan(1, 2, (members[0], members[2]), CHUNK, 0, SIZE))
        all_have([relays[2]], 1, digest)
        assert not [report for report in relays[2].reports if report.what == "lost"]


def test_a_version_that_overtakes_an_unfinished_one_is_what_all_end_with(transport: str) -> None:
    with relay_processes(4, transport, progress_deadline=PATIENCE) as (relays, members):
        prepared(relays)
        relays[0].call("send", chain_of(members, 1, SIZE, chunk=CHUNK))
        relays[-1].wait_for("fed")
        digest = relays[0].call("publish", 2)
        relays[0].call("send", chain_of(members, 2, SIZE, epoch=2, chunk=CHUNK))
        all_have(relays[1:], 2, digest)


def test_the_shards_of_two_roots_make_one_version(transport: str) -> None:
    with relay_processes(4, transport, progress_deadline=PATIENCE) as (relays, members):
        digest = prepared(relays)
        assert relays[1].call("publish", 1) == digest
        border = SIZE // 2
        for part, (start, stop) in enumerate([(0, border), (border, SIZE)]):
            chain = (members[part], *members[2:])
            relays[part].call("send", Plan(1, 1, chain, CHUNK, start, stop, part, 2))
        for relay in relays[2:]:
            relay.wait_for("promoted")
            assert relay.call("proven", 1) == digest


def test_only_what_changed_is_sent_where_that_is_quicker_and_everybody_has_the_same_bytes(transport: str) -> None:
    with relay_processes(4, transport, progress_deadline=PATIENCE) as (relays, members):
        digest = prepared(relays[:3])
        relays[0].call("send", chain_of(members[:3], 1, SIZE, chunk=CHUNK))
        all_have(relays[1:3], 1, digest)
        relays[0].wait_for("done")
        relays[0].call("pretend", 1e7)
        digest = relays[0].call("publish_changed", 2, 0.01)
        relays[0].call("send", chain_of(members, 2, SIZE, chunk=CHUNK))  # the last one has no version 1
        all_have(relays[1:], 2, digest)
        relays[0].wait_for("done", where=of_version(2))
        for index, whole_versions in ((1, 1), (2, 1), (3, 1)):
            got = relays[index].call("status").bytes_in - whole_versions * SIZE
            assert (0 < got < SIZE / 10) if index < 3 else got == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2, 4])
def test_twenty_kills_of_each_relay_are_repaired(transport: str, victim: int) -> None:
    """How long that takes is a figure of ``bench relay``."""
    took = [ms for _ in range(20) for ms in kill_in_the_middle(transport, [victim], signal.SIGKILL, count=5)]
    print(f"{transport}, relay {victim} killed: {[round(ms) for ms in took]} ms to new bytes")
