"""A relay of the bench from within: its process, and what it does when told to through its pipe."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from laminar.weights.chain import Plan
from laminar.weights.checksum import chunk_hashes, digest
from laminar.weights.forward import PROGRESS_DEADLINE
from laminar.weights.layout import Layout
from laminar.weights.locks import release
from laminar.weights.mapping import Segment
from laminar.weights.node import NICE, RelayNode
from laminar.weights.owner import SegmentOwner
from laminar.weights.segment import STAGED
from laminar.weights.slots import free_slot
from laminar.weights.stand_in import StandIn
from laminar.weights.transport import open_transport

__all__ = ["Setting", "serve"]

RUN = "bench"
TILE_BYTES = 8 << 20
"""Of what a version is made: little enough to be added to quickly."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a relay process is told at its start."""

    root: Path
    transport: str
    host: str = "127.0.0.1"
    namespace: str | None = None
    progress_deadline: float = PROGRESS_DEADLINE


class _Child:
    """What a relay process does when told to."""

    def __init__(self, pipe: Connection, setting: Setting) -> None:
        self.pipe = pipe
        self.setting = setting
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
        """Stage bytes that differ from every other version's and from place to place, and make them the newest; their
        digest."""
        import numpy as np

        tile = np.arange(TILE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

        def fill(words: Any) -> None:
            for number, start in enumerate(range(0, len(words), len(tile))):
                into = words[start : start + len(tile)]
                np.add(tile[: len(into)], np.uint64(version << 32 | number), out=into)

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
        stand_in = StandIn(
            root,
            self.transport,
            run=RUN,
            report=lambda report: self.tell("report", report),
            progress_deadline=self.setting.progress_deadline,
        )
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


def serve(pipe: Connection, setting: Setting) -> None:
    os.nice(NICE)  # all of it, or a killed relay's end would go before the others, which stand for other hosts
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
