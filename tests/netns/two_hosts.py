"""A Dask cluster over two emulated hosts: the trainer on the first, a relay and a replica on each."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from laminar.bench.hosts import EmulatedHosts, emulated_hosts
from laminar.cluster import CONFIG, ENVIRONMENT

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "flows" / "quickstart.py"
SLOTS = 128
START_DEADLINE = 60.0
PR_SET_PDEATHSIG = 1
WORKERS = (
    ("data", 0, 8, "data=1,task=1"),
    ("trainer", 0, 2, "trainer=1"),
    ("relay-0", 0, 1, "relay=1"),
    ("relay-1", 1, 1, "relay=1"),
    ("rollout-0", 0, SLOTS, f"rollout={SLOTS}"),
    ("rollout-1", 1, SLOTS, f"rollout={SLOTS}"),
)
"""Name, host, threads and resources of each."""


class TwoHosts:
    """The processes of the cluster, and a way to run the command on its first host."""

    def __init__(self, hosts: EmulatedHosts, folder: Path, transport: str, stack: ExitStack) -> None:
        self._hosts = hosts
        self._folder = folder
        self._transport = transport
        self._stack = stack
        self._file = folder / "scheduler.json"

    def start(self) -> None:
        """Start the scheduler and all workers; they may still be on their way when this returns."""
        dask = [sys.executable, "-m", "dask"]
        common = ["--no-dashboard", "--scheduler-file", str(self._file)]
        self._spawn("scheduler", 0, [*dask, "scheduler", "--host", self._hosts.addresses[0], "--port", "0", *common])
        for name, host, threads, resources in WORKERS:
            options = ["--name", name, "--nthreads", str(threads), "--resources", resources, "--memory-limit", "0"]
            where = ["--host", self._hosts.addresses[host], "--local-directory", str(self._folder), "--no-nanny"]
            self._spawn(name, host, [*dask, "worker", *common, *options, *where])

    @property
    def scheduler(self) -> str:
        """Address of the scheduler, once it is up."""
        end = time.monotonic() + START_DEADLINE
        while not self._file.exists():
            assert time.monotonic() < end, f"no scheduler in {START_DEADLINE:g} s:\n{self.said('scheduler')}"
            time.sleep(0.1)
        return str(json.loads(self._file.read_text())["address"])

    def wait_for_workers(self) -> None:
        """Until all have registered."""
        end = time.monotonic() + START_DEADLINE
        while late := [name for name, *_ in WORKERS if "Registered to:" not in self.said(name)]:
            assert time.monotonic() < end, f"{late} are not there after {START_DEADLINE:g} s:\n{self.said(late[0])}"
            time.sleep(0.1)

    def on_first(self, *command: str, deadline: float) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, to its end."""
        inside = ["ip", "netns", "exec", self._hosts.namespaces[0], *command]
        return subprocess.run(
            inside, capture_output=True, text=True, timeout=deadline, cwd=ROOT, env=self._environment(0), check=False
        )

    def flow(self, *options: str, deadline: float) -> subprocess.CompletedProcess[str]:
        """Run the quickstart on the cluster."""
        command = [sys.executable, "-m", "laminar.cli.app", "run", str(FLOW), "--scheduler", self.scheduler, "--json"]
        return self.on_first(*command, "--store", str(self._folder / "runs"), *options, deadline=deadline)

    def said(self, name: str) -> str:
        """What a process wrote."""
        return (self._folder / f"{name}.log").read_text()

    def _environment(self, host: int) -> dict[str, str]:
        settings = {f"DASK_{key.replace('.', '__').replace('-', '_').upper()}": str(it) for key, it in CONFIG.items()}
        ours = {"LAMINAR_HOST": f"host{host}", "LAMINAR_TRANSPORT": self._transport}
        return {**os.environ, **ENVIRONMENT, **settings, **ours}

    def _spawn(self, name: str, host: int, command: list[str]) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        inside = ["ip", "netns", "exec", self._hosts.namespaces[host], *command]
        environment = self._environment(host)
        process = subprocess.Popen(inside, stdout=log, stderr=log, cwd=ROOT, env=environment, preexec_fn=_end_with_us)
        self._stack.callback(_end, process)


def _end_with_us() -> None:
    """In a child: be killed when the process of the tests dies, however it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


@contextmanager
def two_hosts(folder: Path, transport: str, *, megabits: int = 1000) -> Iterator[TwoHosts]:
    """Two hosts and a cluster on them, gone afterwards."""
    with emulated_hosts(2, megabits) as hosts, ExitStack() as stack:
        cluster = TwoHosts(hosts, folder, transport, stack)
        cluster.start()
        yield cluster
