"""Shared memory that is full: what was promised goes on, what is new is refused in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from laminar.errors import LaminarError
from laminar.weights.owner import SegmentOwner
from tests.weights.relay_host import SIZE, Host, layout

ROOM = 8 * SIZE
"""Bytes of a memory of the tests: enough for three slots of a version."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Makes folders in small shared memories of their own."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a memory needs root")
    with ExitStack() as stack:

        def make() -> Path:
            folder = tmp_path / f"memory{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "laminar-test", str(folder)],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
            if done.returncode:
                pytest.skip(f"this user cannot mount: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], timeout=20, check=True)
            return folder

        yield make


def fill(folder: Path) -> None:
    """Take all memory that is left there."""
    stats = os.statvfs(folder)
    with (folder / "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize)


@pytest.mark.parametrize("full", ["sender", "receiver"])
def test_versions_go_on_without_changes_when_the_memory_is_full_later(
    memory: Callable[[], Path], caplog: pytest.LogCaptureFixture, full: str
) -> None:
    folders = {"sender": memory(), "receiver": memory()}
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
    memory: Callable[[], Path],
) -> None:
    folder = memory()
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
