"""Where each tensor lies in the flat buffer of a version. Exchanged once; knows nothing of torch.

A buffer is one run of bytes: tensors at 64-byte-aligned offsets in the order in which engines want them,
the gaps between them zero. It is hashed, copied and sent in chunks of ``chunk_bytes``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from laminar.errors import LaminarError

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "CHUNK_BYTES", "Layout", "Piece", "TensorSpec", "engine_order"]

ALIGNMENT = 64
"""Bytes. A cache line, and enough for every dtype's view and every vector load."""

CHUNK_BYTES = 4 << 20
"""Bytes a checksum covers: small enough to be hashed from the cache, large enough to cost no time by
number."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines keep as one matrix; side by side they can be taken over as one piece."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, dtype as torch spells it (``"bfloat16"``), shape, and place in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor that fall into one chunk. ``source``: byte within the tensor; ``target``: within
    the chunk. ``tensor`` is the index in ``Layout.tensors``."""

    tensor: int
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The map of a flat buffer. Build it with ``Layout.of`` (tensors) or ``Layout.pack`` (sizes).

    Parameters
    ----------
    tensors
        In buffer order, offsets ascending and aligned to 64 bytes.
    nbytes
        Size of the buffer, a multiple of 64.
    chunk_bytes
        Bytes a checksum covers; the last chunk may be shorter. A multiple of 64.
    """

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        end = 0
        for spec in self.tensors:
            if spec.offset % ALIGNMENT or spec.offset < end or spec.nbytes < 0:
                raise ValueError(f"tensor {spec.name} at byte {spec.offset}: not aligned, or over the one before")
            end = spec.offset + spec.nbytes
        if not 0 < end <= self.nbytes or self.nbytes % ALIGNMENT:
            raise ValueError(f"tensors end at byte {end} of a buffer of {self.nbytes}: nothing, or too much")
        if self.chunk_bytes <= 0 or self.chunk_bytes % ALIGNMENT:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: expected a positive multiple of {ALIGNMENT}")
        if len(self.by_name) != len(self.tensors):
            raise ValueError("two tensors have the same name")

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Layout:
        """Layout of named tensors, any dtype and device, in engine order."""
        named = tensors.items() if isinstance(tensors, Mapping) else tensors
        specs = [TensorSpec(name, _dtype(t), tuple(t.shape), t.numel() * t.element_size()) for name, t in named]
        return cls.pack(specs, chunk_bytes=chunk_bytes)

    @classmethod
    def pack(cls, specs: Iterable[TensorSpec], *, chunk_bytes: int = CHUNK_BYTES) -> Layout:
        """Give each tensor its place; the offsets in ``specs`` are not looked at.

        Example
        -------
        >>> layout = Layout.pack([TensorSpec("a", "int8", (3,), 3), TensorSpec("b", "float32", (2, 2), 16)])
        >>> [(t.name, t.offset) for t in layout.tensors], layout.nbytes
        ([('a', 0), ('b', 64)], 128)
        """
        by_name = {spec.name: spec for spec in specs}
        placed, end = [], 0
        for name in engine_order(by_name):
            spec = by_name[name]
            placed.append(TensorSpec(name, spec.dtype, spec.shape, spec.nbytes, end))
            end = _aligned(end + spec.nbytes)
        return cls(tuple(placed), end, chunk_bytes)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The tensors by their names, in buffer order."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def hash(self) -> str:
        """16 hex digits over everything in the layout: equal where the same bytes mean the same tensors."""
        return xxhash.xxh3_64_hexdigest(self.to_json().encode())

    @property
    def chunks(self) -> int:
        """Number of chunks of the buffer."""
        return math.ceil(self.nbytes / self.chunk_bytes)

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk and the byte after its last."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.nbytes)

    def pieces(self) -> Iterator[tuple[Piece, ...]]:
        """For each chunk in turn, the parts of tensors in it. What no piece covers is padding.

        Example
        -------
        >>> layout = Layout.pack([TensorSpec("a", "int8", (100,), 100)], chunk_bytes=64)
        >>> [[(p.source, p.target, p.nbytes) for p in chunk] for chunk in layout.pieces()]
        [[(0, 0, 64)], [(64, 0, 36)]]
        """
        first = 0
        for chunk in range(self.chunks):
            start, stop = self.span(chunk)
            pieces = []
            for index in range(first, len(self.tensors)):
                spec = self.tensors[index]
                if spec.offset >= stop:
                    break
                begin, end = max(start, spec.offset), min(stop, spec.offset + spec.nbytes)
                if begin < end:
                    pieces.append(Piece(index, begin - spec.offset, begin - start, end - begin))
                if spec.offset + spec.nbytes <= stop:
                    first = index + 1
            yield tuple(pieces)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ``LaminarError`` unless every tensor of the layout is there, with its shape and dtype."""
        for spec in self.tensors:
            tensor = tensors.get(spec.name)
            if tensor is None:
                raise LaminarError(f"tensor {spec.name} is missing: the layout has {len(self.tensors)} tensors")
            if tuple(tensor.shape) != spec.shape or _dtype(tensor) != spec.dtype:
                raise LaminarError(
                    f"tensor {spec.name} is {_dtype(tensor)} {tuple(tensor.shape)}, the layout says "
                    f"{spec.dtype} {spec.shape}: prepare the relay anew with the layout of this model"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON and for Dask's messages."""
        return {
            "tensors": [asdict(spec) | {"shape": list(spec.shape)} for spec in self.tensors],
            "nbytes": self.nbytes,
            "chunk_bytes": self.chunk_bytes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """The inverse of ``to_dict``. ``ValueError`` where the values make no layout."""
        try:
            specs = tuple(TensorSpec(**spec | {"shape": tuple(spec["shape"])}) for spec in values["tensors"])
            return cls(specs, values["nbytes"], values["chunk_bytes"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a layout: {type(error).__name__}: {error}") from error

    def to_json(self) -> str:
        """Compact JSON, always the same text for the same layout."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The inverse of ``to_json``. ``ValueError`` where the text is no layout."""
        return cls.from_dict(json.loads(text))


def engine_order(names: Iterable[str]) -> list[str]:
    """The given order, but with q, k, v and gate, up side by side, where the first of them stood.

    Example
    -------
    >>> engine_order(["0.q_proj.weight", "0.q_proj.bias", "0.k_proj.weight", "0.v_proj.weight", "norm"])
    ['0.q_proj.weight', '0.k_proj.weight', '0.v_proj.weight', '0.q_proj.bias', 'norm']
    """
    left = dict.fromkeys(names)
    order = []
    while left:
        name = next(iter(left))
        together = [other for other in _fused_with(name) if other in left] or [name]
        for other in together:
            del left[other]
        order += together
    return order


def _fused_with(name: str) -> list[str]:
    """Names that belong beside ``name``, itself included; empty for most tensors."""
    parts = name.split(".")
    for family in FUSED:
        for index, part in enumerate(parts):
            if part in family:
                return [".".join([*parts[:index], member, *parts[index + 1 :]]) for member in family]
    return []


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
