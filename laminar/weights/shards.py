"""A trainer of several shards, each with a part of the tensors and on a host of its own: every shard hands over its
part, the relays send each part down a chain of its own, and a host sees the version once all parts are in.

A part is a range of the flat buffer that starts at a chunk, so that a chunk's hash belongs to one part. (Trainer
processes that share a host and its relay are one shard: one of them hands over for all.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.weights.attachment import Attachment
from laminar.weights.layout import CHUNK_BYTES, Layout, TensorSpec
from laminar.weights.segment import PARTIAL, SLOT_HASHES
from laminar.weights.slots import staging

if TYPE_CHECKING:
    import torch

__all__ = ["Shard", "ShardPublisher", "pack_shards"]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of every version: number ``part`` of ``parts``, bytes ``start`` to ``stop`` of the flat buffer."""

    part: int
    parts: int
    start: int
    stop: int

    def to_dict(self) -> dict[str, int]:
        """Plain values, for Dask's messages."""
        return {"part": self.part, "parts": self.parts, "start": self.start, "stop": self.stop}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Shard:
        """The inverse of ``to_dict``."""
        return cls(**values)

    def layout(self, whole: Layout) -> Layout:
        """The layout of the part alone, its first byte being byte 0.

        Example
        -------
        >>> whole, shards = pack_shards([[TensorSpec("a", "int8", (3,), 3)], [TensorSpec("b", "int8", (5,), 5)]], 64)
        >>> shards[1].layout(whole).tensors[0].name, shards[1].layout(whole).nbytes
        ('b', 64)
        """
        inside = (spec for spec in whole.tensors if self.start <= spec.offset < self.stop)
        moved = tuple(replace(spec, offset=spec.offset - self.start) for spec in inside)
        return Layout(moved, self.stop - self.start, whole.chunk_bytes)


def pack_shards(
    shards: Sequence[Iterable[TensorSpec]], chunk_bytes: int = CHUNK_BYTES
) -> tuple[Layout, tuple[Shard, ...]]:
    """One layout of all shards' tensors, and the part of each. Less than a chunk a shard is left empty.

    Example
    -------
    >>> a, b = TensorSpec("a", "int8", (100,), 100), TensorSpec("b", "int8", (64,), 64)
    >>> layout, shards = pack_shards([[a], [b]], chunk_bytes=64)
    >>> [(spec.name, spec.offset) for spec in layout.tensors], [(shard.start, shard.stop) for shard in shards]
    ([('a', 0), ('b', 128)], [(0, 128), (128, 192)])
    """
    tensors: list[TensorSpec] = []
    borders = [0]
    for index, specs in enumerate(shards):
        own = Layout.pack(specs, chunk_bytes=chunk_bytes)
        tensors += [replace(spec, offset=spec.offset + borders[-1]) for spec in own.tensors]
        last = index == len(shards) - 1
        borders.append(borders[-1] + (own.nbytes if last else own.chunks * chunk_bytes))
    parts = tuple(Shard(i, len(shards), borders[i], borders[i + 1]) for i in range(len(shards)))
    return Layout(tuple(tensors), borders[-1], chunk_bytes), parts


class ShardPublisher:
    """Stages one part of each version in the segment at ``root``, as ``Publisher`` does whole versions.

    Parameters
    ----------
    deadline
        Seconds to wait for a slot while readers pin all of them.
    """

    def __init__(self, root: Path, shard: Shard, *, deadline: float = 10.0) -> None:
        self.root = root
        self.shard = shard
        self._deadline = deadline
        self._attachment = Attachment(root, writable=True)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> float:
        """Copy this shard's tensors into a free slot and stage them; seconds that it took. Blocking: for a thread.

        Raises
        ------
        ValueError
            The version is not newer than the newest that can be read.
        LaminarError
            Nothing is prepared, or the tensors are not those of the shard.
        TimeoutError
            No slot came free; the message says which process pins which.
        """
        from laminar.weights.tensors import fill

        began = time.perf_counter()
        stage = staging(
            self._attachment,
            version,
            PARTIAL,
            check=lambda layout: self.shard.layout(layout).check(tensors),
            deadline=self._deadline,
        )
        with stage as (segment, slot):
            own = self.shard.layout(segment.layout)
            hashes = fill(slot.payload[self.shard.start : self.shard.stop], tensors, own)
            for index, value in enumerate(hashes, SLOT_HASHES + self.shard.start // segment.layout.chunk_bytes):
                slot.words[index] = value
        return time.perf_counter() - began

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._attachment.close()
