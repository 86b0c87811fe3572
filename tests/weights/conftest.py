"""Folders of real shared memory, and child processes that end with their test."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.weights.owner import SegmentOwner

Start = Callable[..., ForkProcess]


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for one segment, out of reach of other runs' sweeps."""
    base = Path("/dev/shm") / f"test-weights-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield base / "laminar-run"
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def owner(root: Path, request: pytest.FixtureRequest) -> Iterator[SegmentOwner]:
    """The relay's half of a segment, prepared for the ``LAYOUT`` of the test's module."""
    owner = SegmentOwner(root)
    owner.prepare(request.module.LAYOUT)
    yield owner
    owner.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes folders in shared memories of their own, of so many bytes each."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a memory needs root")
    with ExitStack() as stack:

        def make(room: int) -> Path:
            folder = tmp_path / f"memory{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={room}", "laminar-test", str(folder)],
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


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a function in a process of its own; whatever still runs at the end is killed."""
    started: list[ForkProcess] = []

    def run(function: Callable[..., Any], *arguments: Any) -> ForkProcess:
        process = multiprocessing.get_context("fork").Process(target=_alone, args=(function, *arguments))
        process.start()
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.join(10)


def _alone(function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    function(*arguments)
