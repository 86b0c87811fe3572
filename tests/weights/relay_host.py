"""A relay's data plane in this process, without a scheduler."""

from __future__ import annotations

import threading
from pathlib import Path

from laminar.weights.chain import Member, Plan
from laminar.weights.checksum import chunk_hashes, digest
from laminar.weights.forward import Report
from laminar.weights.layout import Layout, TensorSpec
from laminar.weights.locks import release
from laminar.weights.mapping import Segment
from laminar.weights.node import RelayNode
from laminar.weights.owner import SegmentOwner
from laminar.weights.segment import STAGED
from laminar.weights.slots import free_slot
from laminar.weights.tcp import Tcp

__all__ = ["SIZE", "Host", "layout"]

SIZE = 1 << 20


def layout(name: str = "a", nbytes: int = SIZE) -> Layout:
    return Layout.pack([TensorSpec(name, "int8", (nbytes,), nbytes)])


class Host:
    """A relay in this process."""

    def __init__(self, root: Path, run: str = "one", token: str = "") -> None:
        self.owner = SegmentOwner(root)
        self.reports: list[Report] = []
        self._said = threading.Condition()
        self.node = RelayNode(self.owner, Tcp(), run=run, token=token, report=self._hear, progress_deadline=0.5)
        self.member = Member(root.name, "here", self.node.address)

    def publish(self, version: int) -> str:
        """Make a version of one byte, its number, the newest here; its digest."""
        return self._stage(version, bytes([version]) * self.nbytes)

    def publish_changed(self, version: int, *, base: int) -> str:
        """Make a version that differs in one byte from another the newest here; its digest."""
        with self.owner.pinned(base) as slot:
            content = bytearray(slot.payload)
        content[version] ^= 255
        return self._stage(version, content)

    def _stage(self, version: int, content: bytes | bytearray) -> str:
        segment = Segment(self.owner.root, writable=True)
        slot, lock = free_slot(segment, version, deadline=1)
        slot.payload[:] = content
        slot.hashes = hashes = chunk_hashes(slot.payload, segment.layout)
        slot.digest = digest(hashes)
        slot.stamp = (version, STAGED)
        release(lock)
        return self.owner.promote(version).digest

    @property
    def nbytes(self) -> int:
        """Size of a version."""
        assert self.owner.layout is not None
        return self.owner.layout.nbytes

    def send(self, version: int, *others: Host) -> None:
        members = (self.member, *(other.member for other in others))
        self.node.send(Plan(version, version, members, 1 << 18, 0, self.nbytes))

    def said(self, what: str) -> Report:
        """Wait for a report."""
        with self._said:
            assert self._said.wait_for(lambda: any(it.what == what for it in self.reports), 20), self.reports
            return next(it for it in self.reports if it.what == what)

    def _hear(self, report: Report) -> None:
        with self._said:
            self.reports.append(report)
            self._said.notify_all()
