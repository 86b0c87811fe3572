"""Relays in processes of their own, without Dask: what the bench measures and the fault tests kill."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from laminar.weights.chain import Member, Plan, chunk_bytes
from laminar.weights.checksum import chunk_hashes, digest
from laminar.weights.forward import PROGRESS_DEADLINE, Report
from laminar.weights.layout import Layout, TensorSpec
from laminar.weights.locks import release
from laminar.weights.mapping import Segment
from laminar.weights.node import RelayNode
from laminar.weights.owner import SegmentOwner
from laminar.weights.segment import STAGED
from laminar.weights.slots import free_slot
from laminar.weights.stand_in import StandIn
from laminar.weights.transport import open_transport

__all__ = ["RelayProcess", "bytes_layout", "chain_of", "relay_processes"]

RUN = "bench"
START_DEADLINE = 60.0


def bytes_layout(nbytes: int) -> Layout:
    """A layout of one tensor of bytes."""
    return Layout.pack([TensorSpec("weights", "uint8", (nbytes,), nbytes)])


@dataclass(frozen=True, slots=True)
class Setting:
    """What a relay process is told at its start."""

    root: Path
    transport: str
    host: str = "127.0.0.1"
    namespace: str | None = None
    progress_deadline: float = PROGRESS_DEADLINE


class RelayProcess:
    """A relay's data plane in a child process, steered through a pipe."""

    def __init__(self, index: int, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = f"relay-{index}"
        self.setting = setting
        self.reports: list[Report] = []
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setting), daemon=True)
        self.process.start()
        theirs.close()

    def started(self) -> Member:
        """Wait until it listens; how others see it."""
        return Member(self.name, self.setting.host, str(self._answer(START_DEADLINE)))

    def call(self, what: str, *arguments: Any, deadline: float = 60.0) -> Any:
        """Have the process do something; its answer."""
        self._pipe.send((what, arguments))
        return self._answer(deadline)

    def wait_for(
        self, what: str, *, deadline: float = 60.0, where: Callable[[Report], bool] = lambda it: True
    ) -> Report:
        """The first report of a kind, come or to come."""
        until = time.monotonic() + deadline
        seen = 0
        while True:
            for report in self.reports[seen:]:
                if report.what == what and where(report):
                    return report
            seen = len(self.reports)
            left = until - time.monotonic()
            if left < 0 or not self._pipe.poll(left):
                said = [(it.what, it.version, it.why) for it in self.reports]
                raise TimeoutError(f"{self.name} did not report `{what}` in {deadline:g} s; it said {said}")
            kind, value = self._pipe.recv()
            assert kind == "report", f"{self.name} answered {value!r} to nobody"
            self.reports.append(value)

    def signal(self, number: int) -> float:
        """Send the process a signal; when (unix seconds)."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, number)
        return time.time()

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.join(10)
        self._pipe.close()

    def _answer(self, deadline: float) -> Any:
        until = time.monotonic() + deadline
        while True:
            if not self._pipe.poll(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"{self.name} did not answer in {deadline:g} s")
            kind, value = self._pipe.recv()
            if kind == "error":
                raise RuntimeError(f"{self.name}: {value}")
            if kind == "answer":
                return value
            self.reports.append(value)


@contextmanager
def relay_processes(
    count: int,
    transport: str = "tcp",
    *,
    hosts: Sequence[str] = (),
    namespaces: Sequence[str] = (),
    progress_deadline: float = PROGRESS_DEADLINE,
) -> Iterator[tuple[list[RelayProcess], list[Member]]]:
    """Start relays, one of them more than there are hops, and end them and remove their memory whatever happens.

    Parameters
    ----------
    hosts, namespaces
        For each relay the address to listen on and the network namespace to be in; none: all on loopback.
    """
    base = Path("/dev/shm") / f"bench-relays-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    relays: list[RelayProcess] = []
    try:
        for index in range(count):
            host = hosts[index] if hosts else "127.0.0.1"
            namespace = namespaces[index] if namespaces else None
            setting = Setting(base / f"laminar-host{index}", transport, host, namespace, progress_deadline)
            relays.append(RelayProcess(index, setting))
        yield relays, [relay.started() for relay in relays]
    finally:
        for relay in relays:
            relay.end()
        shutil.rmtree(base, ignore_errors=True)


def chain_of(members: Sequence[Member], version: int, nbytes: int, *, epoch: int = 1, chunk: int = 0) -> Plan:
    """The plan that sends a version down the members as they stand."""
    chunk = chunk or chunk_bytes(nbytes, len(members) - 1)
    return Plan(version, epoch, tuple(members), chunk, 0, nbytes)


class _Child:
    """What a relay process does when told to."""

    def __init__(self, pipe: Connection, setting: Setting) -> None:
        self.pipe = pipe
        self.writing = threading.Lock()
        self.owner = SegmentOwner(setting.root)
        self.transport = open_transport(setting.transport)
        self.node = RelayNode(
            self.owner,
            self.transport,
            run=RUN,
            host=setting.host,
            report=lambda report: self.tell("report", report),
            progress_deadline=setting.progress_deadline,
        )

    def tell(self, kind: str, value: Any) -> None:
        with self.writing, suppress(OSError):  # whoever asked may be gone
            self.pipe.send((kind, value))

    def prepare(self, layout: Layout, slots: int = 3) -> None:
        self.owner.prepare(layout, slots=slots)

    def publish(self, version: int) -> str:
        """Stage bytes that differ from every other version's everywhere, and make them the newest; their digest."""
        import numpy as np

        def fill(words: Any) -> None:
            count = np.uint64(len(words) * version)
            words[:] = (np.arange(len(words), dtype=np.uint64) + count) * np.uint64(0x9E3779B97F4A7C15)

        return self._stage(version, fill)

    def publish_file(self, version: int, path: Path) -> str:
        """Stage the bytes of a file, and make them the newest; their digest."""
        import numpy as np

        def fill(words: Any) -> None:
            words[:] = np.fromfile(path, np.uint64)

        return self._stage(version, fill)

    def publish_changed(self, version: int, share: float) -> str:
        """Stage the newest version with a share of its bytes changed, and make it the newest; its digest."""
        import numpy as np

        head = self.owner.head()
        assert head is not None

        def fill(words: Any) -> None:
            with self.owner.pinned(head) as slot:
                words[:] = np.frombuffer(slot.payload, np.uint64)
            random = np.random.default_rng(version)
            words.view(np.uint8)[random.integers(0, words.nbytes, int(words.nbytes * share))] += np.uint8(version)

        return self._stage(version, fill)

    def _stage(self, version: int, fill: Callable[[Any], None]) -> str:
        import numpy as np

        segment = Segment(self.owner.root, writable=True)
        slot, lock = free_slot(segment, version, deadline=5.0)
        try:
            slot.stamp = None
            fill(np.frombuffer(slot.payload, np.uint64))
            slot.hashes = hashes = chunk_hashes(slot.payload, segment.layout)
            slot.digest = digest(hashes)
            slot.stamp = (version, STAGED)
        finally:
            release(lock)
        return self.owner.promote(version).digest

    def pretend(self, rate: float) -> None:
        """Believe that the link carries so many bytes/s."""
        self.node.link_rate = rate

    def send(self, plan: Plan) -> float:
        self.node.send(plan)
        return time.time()

    def stand_in(self, root: Path, plan: Plan) -> float:
        """Send what another relay left, as the trainer does when that one is dead."""
        stand_in = StandIn(root, self.transport, run=RUN, report=lambda report: self.tell("report", report))
        stand_in.send(plan)
        return time.time()

    def held(self, version: int) -> int:
        return self.node.held(version)

    def proven(self, version: int) -> str:
        """Hash all of a version again; its digest."""
        with self.owner.pinned(version) as slot:
            slot.verify()
            return slot.digest

    def status(self) -> Any:
        return self.node.status()

    def cpu(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime


def _serve(pipe: Connection, setting: Setting) -> None:
    try:
        if setting.namespace is not None:
            enter_namespace(setting.namespace)
        child = _Child(pipe, setting)
    except Exception as error:  # noqa: BLE001 - the parent is told and raises it
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    child.tell("answer", child.node.address)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            child.tell("answer", getattr(child, what)(*arguments))
        except Exception as error:  # noqa: BLE001 - the parent is told and raises it
            child.tell("error", f"{type(error).__name__}: {error}")


def enter_namespace(name: str) -> None:
    """Move this process into a named network namespace. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, 0x40000000):
            number = ctypes.get_errno()
            raise OSError(number, f"network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)
