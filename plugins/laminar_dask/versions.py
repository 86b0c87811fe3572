"""Where a replica's weights come from: the host's relay, or a number where the engine is emulated."""

from __future__ import annotations

from typing import Protocol

from laminar.errors import RunFailed
from laminar.rollout.emulation import EmulatedVersions
from laminar.rollout.engine import Engine
from laminar.trajectory import Version
from laminar.weights.reader import WeightReader
from laminar.weights.segment import segment_root

__all__ = ["EmulatedSource", "RelaySource", "VersionSource"]


class VersionSource(Protocol):
    """What the gate needs to know of weight versions."""

    def newest(self) -> Version | None:
        """Newest version that can be loaded; None before there is one."""

    def held(self) -> list[Version]:
        """All that can be loaded now."""

    def load(self, engine: Engine, version: Version) -> None:
        """Put a version into the engine. Blocking. LookupError if it is gone."""

    def close(self) -> None:
        """Let go."""


class RelaySource:
    """The shared memory of the host's relay."""

    def __init__(self, run: str) -> None:
        self.reader = WeightReader(segment_root(run))
        self.newest = self.reader.newest
        self.held = self.reader.held
        self.close = self.reader.close

    def load(self, engine: Engine, version: Version) -> None:
        """Load, and prove that the engine serves just what was published."""
        from laminar.weights.layout import Layout
        from laminar.weights.tensors import digest_of

        with self.reader.pull(version) as pulled:
            engine.load(version, pulled.tensors)
            published = pulled.tensors
            # An engine may keep some weights in a wider type, which loses nothing: they are compared as published.
            served = {name: tensor.to(published[name].dtype) for name, tensor in engine.weights().items()}
            digest = digest_of(served, Layout.of(served))
            if digest != pulled.digest:
                raise RunFailed(
                    f"the engine serves weights with checksum {digest}, version {version} was published with "
                    f"{pulled.digest}; it does not go on with wrong weights"
                )


class EmulatedSource:
    """Version numbers in a file."""

    def __init__(self, run: str) -> None:
        self.versions = EmulatedVersions(segment_root(run))
        self.newest = self.versions.newest
        self.held = self.versions.held

    def load(self, engine: Engine, version: Version) -> None:
        """Takes as long as the emulation says."""
        if version not in self.held():
            raise LookupError(f"version {version} is not held; held: {self.held()}")
        engine.load(version, {})

    def close(self) -> None:
        """Nothing is held."""
