"""Shared memory that is full: what was promised goes on, what is new is refused in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.errors import LaminarError
from laminar.weights.owner import SegmentOwner
from tests.weights.relay_host import SIZE, Host, layout

ROOM = 8 * SIZE
"""Bytes of a memory of the tests: enough for three slots of a version."""


def fill(folder: Path) -> None:
    """Take all memory that is left there."""
    stats = os.statvfs(folder)
    with (folder / "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize)


@pytest.mark.parametrize("full", ["sender", "receiver"])
def test_versions_go_on_without_changes_when_the_memory_is_full_later(
    memory: Callable[[int], Path], caplog: pytest.LogCaptureFixture, full: str
) -> None:
    folders = {"sender": memory(ROOM), "receiver": memory(ROOM)}
    hosts = [Host(folder / f"laminar-{name}") for name, folder in folders.items()]
    first, second = hosts
    try:
        for each in hosts:
            each.owner.prepare(layout())
        first.publish(1)
        first.send(1, second)
        second.said("promoted")
        fill(folders[full])
        for version in (2, 3):
            second.reports.clear()
            first.node.link_rate = 1e4  # so slow that changes are worth it
            first.publish_changed(version, base=version - 1)
            first.send(version, second)
            second.said("promoted")
            assert second.owner.head() == version
            with second.owner.pinned(version) as slot:
                slot.verify()
        assert "no memory for changes (No space left on device): version 2" in caplog.text
        assert second.node.status().bytes_in == 3 * SIZE
    finally:
        for each in hosts:
            each.node.close()
            each.owner.close()


def test_a_memory_that_is_full_at_the_start_is_one_line_with_the_bytes_and_others_go_on(
    memory: Callable[[int], Path],
) -> None:
    folder = memory(ROOM)
    host = Host(folder / "laminar-one")
    host.owner.prepare(layout())
    host.publish(1)
    fill(folder)
    other = SegmentOwner(folder / "laminar-two")
    with pytest.raises(LaminarError, match=r"3 slots of the weights need 3,\S+ bytes, 0 are free: free shared memory"):
        other.prepare(layout())
    assert host.owner.held() == [1]
    other.close()
    host.node.close()
    host.owner.close()
