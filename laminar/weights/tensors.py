"""Tensors to the bytes of a flat buffer and back: copy, hash, view."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from laminar.weights.checksum import THREADS, chunk_hash, digest
from laminar.weights.layout import Layout

__all__ = ["digest_of", "fill", "views"]

CACHED_BYTES = 2 << 20
"""Bytes that a core hashes before it copies them: a cache still holds them then."""

TASK_CHUNKS = 8
"""Most chunks that a thread copies at a time: enough not to wait for the interpreter's lock."""

HELD_CHUNKS = TASK_CHUNKS * (THREADS + 1)
"""Chunks under work at once."""

HostPieces = list[tuple[int, npt.NDArray[np.uint8]]]
"""Parts of one chunk: the byte in the chunk where a part goes, and its bytes."""

TensorPieces = list[tuple[int, torch.Tensor]]
"""The same, on any device."""


def digest_of(tensors: Mapping[str, torch.Tensor], layout: Layout) -> str:
    """The digest that these tensors would be published with: a version's, if their bytes are its bytes.

    Tensors that the layout does not name are not looked at.

    Raises
    ------
    LaminarError
        A tensor is missing, or has another shape or dtype than the layout says.
    """
    layout.check(tensors)
    buffer = np.zeros(layout.chunk_bytes, np.uint8)
    hashes = []
    for chunk, pieces in enumerate(_host_pieces(tensors, layout)):
        start, stop = layout.span(chunk)
        if len(pieces) == 1 and pieces[0][1].size == stop - start:
            hashes.append(chunk_hash(pieces[0][1].data))
            continue
        buffer.fill(0)
        for target, data in pieces:
            np.copyto(buffer[target : target + data.size], data)
        hashes.append(chunk_hash(buffer[: stop - start].data))
    return digest(hashes)


def fill(payload: memoryview, tensors: Mapping[str, torch.Tensor], layout: Layout) -> list[int]:
    """Copy tensors into a flat buffer, once, and return the hash of each chunk.

    A few threads take some chunks each: hash a little of a tensor, and copy that while it is in the core's own cache.
    (Not torch's threads: those would all be woken for each chunk.) Padding is left alone: it is zero in a new slot,
    and stays so.
    """
    buffer = np.frombuffer(payload, np.uint8)

    def hash_and_copy(chunk: int, pieces: HostPieces) -> int:
        start, stop = layout.span(chunk)
        hashed, state = start, xxhash.xxh3_64()
        for target, data in pieces:
            state.update(payload[hashed : start + target])
            for offset in range(0, data.size, CACHED_BYTES):
                piece = data[offset : offset + CACHED_BYTES]
                begin = start + target + offset
                hashed = begin + piece.size
                state.update(piece.data)
                np.copyto(buffer[begin:hashed], piece)
        state.update(payload[hashed:stop])
        return int(state.intdigest())

    def some(first: int, chunks: Sequence[HostPieces]) -> list[int]:
        return [hash_and_copy(chunk, pieces) for chunk, pieces in enumerate(chunks, first)]

    size = max(1, min(TASK_CHUNKS, layout.chunks // (4 * THREADS)))
    hashes: list[Future[list[int]]] = []
    with ThreadPoolExecutor(THREADS, "laminar-copy") as pool:
        all_pieces = _host_pieces(tensors, layout)
        for number, first in enumerate(range(0, layout.chunks, size)):
            hashes.append(pool.submit(some, first, list(itertools.islice(all_pieces, size))))
            if number >= THREADS:
                hashes[number - THREADS].result()  # its pieces may be overwritten from now on
        return [value for future in hashes for value in future.result()]


def views(payload: memoryview, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a flat buffer where they lie. Of a read-only buffer they must not be written to: the
    memory is protected, and the process that writes dies (SIGSEGV)."""
    buffer = torch.frombuffer(payload, dtype=torch.uint8)
    return {
        spec.name: buffer[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in layout.tensors
    }


def _host_pieces(tensors: Mapping[str, torch.Tensor], layout: Layout) -> Iterator[HostPieces]:
    """For each chunk its pieces in host memory, good until ``HELD_CHUNKS`` more chunks were asked for."""
    chunks = _pieces(tensors, layout)
    devices = {tensors[spec.name].device for spec in layout.tensors}
    cuda = [device for device in devices if device.type == "cuda"]
    on_host = _staged(chunks, layout.chunk_bytes, cuda[0]) if cuda else chunks
    return ([(target, data.numpy()) for target, data in pieces] for pieces in on_host)


def _pieces(tensors: Mapping[str, torch.Tensor], layout: Layout) -> Iterator[TensorPieces]:
    """The pieces where they are. At most one tensor is made contiguous at a time."""
    index, flat = -1, torch.empty(0)
    for pieces in layout.pieces():
        parts: TensorPieces = []
        for piece in pieces:
            if piece.tensor != index:
                index = piece.tensor
                flat = tensors[layout.tensors[index].name].detach().contiguous().reshape(-1).view(torch.uint8)
            parts.append((piece.target, flat[piece.source : piece.source + piece.nbytes]))
        yield parts


def _staged(chunks: Iterator[TensorPieces], chunk_bytes: int, device: torch.device) -> Iterator[TensorPieces]:
    """Bring pieces from a GPU through a ring of pinned buffers: one chunk leaves the GPU while others are used.

    The copies run on a stream of their own, after what the current stream has still to do to the tensors.
    This path has not been run on a GPU yet.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(HELD_CHUNKS + 2)]
    under_way: tuple[torch.cuda.Event, TensorPieces] | None = None
    for chunk, pieces in enumerate(chunks):
        buffer, parts = buffers[chunk % len(buffers)], []
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for target, data in pieces:
                part = buffer[target : target + data.numel()]
                part.copy_(data, non_blocking=True)
                if data.is_cuda:
                    data.record_stream(stream)
                parts.append((target, part))
            done.record(stream)
        if under_way is not None:
            under_way[0].synchronize()
            yield under_way[1]
        under_way = done, parts
    if under_way is not None:
        under_way[0].synchronize()
        yield under_way[1]
