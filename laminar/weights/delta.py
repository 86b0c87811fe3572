"""Only what changed between two versions: positions by gaps and new values, block by block, exact to the bit.

At the learning rates of reinforcement learning most bfloat16 weights do not change in a step (arXiv 2602.03839 finds
99 %). Values are sent, not differences, so nothing is rounded. A block that changed too much travels whole.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar.errors import LaminarError
from laminar.weights.checksum import THREADS
from laminar.weights.layout import Layout

__all__ = ["BLOCK_BYTES", "apply", "encode", "sampled_share", "word_bytes", "worth_it"]

BLOCK_BYTES = 8 << 20
HEADER = struct.Struct("<IIII")
"""Block, count of changed words, count of long gaps, bytes of a word. ``WHOLE`` as the count: the block as it is."""
WHOLE = 0xFFFFFFFF
LONG = 255
"""A gap of this many words or more stands in the list of long gaps."""

DENSEST = 0.1
"""Share of changed words above which a version is sent whole without a try."""

ENCODE_RATE, APPLY_RATE = 1.0e9, 3.0e9
"""Bytes of a version that one core compares and encodes, or copies and changes, in a second, at 1 to 3 % changed."""

Words = npt.NDArray[Any]


def word_bytes(layout: Layout) -> int:
    """Bytes of the words that are compared: the width of most of the model's elements.

    Example
    -------
    >>> from laminar.weights.layout import TensorSpec
    >>> word_bytes(Layout.pack([TensorSpec("a", "bfloat16", (9,), 18), TensorSpec("b", "float32", (1,), 4)]))
    2
    """
    widths: Counter[int] = Counter()
    for spec in layout.tensors:
        elements = int(np.prod(spec.shape, dtype=np.int64)) or 1
        widths[max(1, spec.nbytes // elements)] += spec.nbytes
    width = widths.most_common(1)[0][0]
    return width if width in (1, 2, 4, 8) else 8


def sampled_share(old: memoryview, new: memoryview, word: int, *, every: int = 64) -> float:
    """Share of words that changed, from one page in ``every``."""
    before, after = _words(old, word), _words(new, word)
    page = 4096 // word
    starts = range(0, len(before), page * every)
    changed = sum(int(np.count_nonzero(before[i : i + page] != after[i : i + page])) for i in starts)
    return changed / max(1, sum(min(page, len(before) - i) for i in starts))


def worth_it(nbytes: int, share: float, rate: float, *, word: int) -> bool:
    """Whether a version gets to the next relay sooner as changes than whole.

    Parameters
    ----------
    nbytes
        Size of a version.
    share
        Of its words, those that changed.
    rate
        Bytes/s that the link was seen to carry.

    Example
    -------
    >>> [worth_it(1 << 30, share, rate, word=2) for share, rate in ((0.01, 0.12e9), (0.01, 8e9), (0.3, 0.12e9))]
    [True, False, False]
    """
    if share > DENSEST:
        return False
    changes = nbytes / word * share * (word + 1)
    return nbytes / ENCODE_RATE + changes / rate + nbytes / APPLY_RATE < nbytes / rate


def encode(old: memoryview, new: memoryview, word: int) -> bytes:
    """The changes that make ``new`` of ``old``; both of the same size, a multiple of ``word``."""
    before, after = _words(old, word), _words(new, word)
    size = BLOCK_BYTES // word
    with ThreadPoolExecutor(THREADS, "laminar-delta") as pool:
        blocks = pool.map(
            lambda start: _encode_block(start // size, before[start : start + size], after[start : start + size], word),
            range(0, len(before), size),
        )
        return b"".join(blocks)


def apply(into: memoryview, changes: memoryview) -> None:
    """Change a buffer that holds the old version into the new one.

    Raises
    ------
    LaminarError
        The changes are cut short, or are none for a buffer of this size.
    """
    with ThreadPoolExecutor(THREADS, "laminar-delta") as pool:
        for done in [pool.submit(_apply_block, into, *block) for block in _blocks(changes)]:
            done.result()


def _encode_block(block: int, before: Words, after: Words, word: int) -> bytes:
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return b""
    if len(changed) * (word + 1) >= after.nbytes:
        return HEADER.pack(block, WHOLE, 0, word) + after.tobytes()
    gaps = np.diff(changed, prepend=-1) - 1
    long = gaps[gaps >= LONG].astype(np.uint32)
    short = np.minimum(gaps, LONG).astype(np.uint8)
    return b"".join(
        (HEADER.pack(block, len(changed), len(long), word), short.tobytes(), long.tobytes(), after[changed].tobytes())
    )


def _blocks(changes: memoryview) -> Iterator[tuple[int, int, int, int, memoryview]]:
    offset = 0
    while offset < len(changes):
        if offset + HEADER.size > len(changes):
            raise LaminarError(f"changes of {len(changes)} bytes end within a block's header")
        block, count, long, word = HEADER.unpack_from(changes, offset)
        offset += HEADER.size
        if word not in (1, 2, 4, 8):
            raise LaminarError(f"changes in words of {word} bytes: expected 1, 2, 4 or 8")
        nbytes = BLOCK_BYTES if count == WHOLE else count + 4 * long + word * count
        yield block, count, long, word, changes[offset : offset + nbytes]
        offset += nbytes


def _apply_block(into: memoryview, block: int, count: int, long: int, word: int, body: memoryview) -> None:
    start = block * BLOCK_BYTES
    target = np.frombuffer(into[start : start + BLOCK_BYTES], f"u{word}")
    if count == WHOLE:
        target[:] = np.frombuffer(body[: target.nbytes], f"u{word}")
        return
    if len(body) != count * (word + 1) + 4 * long:
        raise LaminarError(f"changes of block {block} are cut short: {len(body)} bytes")
    gaps = np.frombuffer(body[:count], np.uint8).astype(np.int64)
    gaps[gaps == LONG] = np.frombuffer(body[count : count + 4 * long], np.uint32)
    places = np.cumsum(gaps + 1) - 1
    if len(places) and places[-1] >= len(target):
        raise LaminarError(f"changes of block {block} reach beyond it")
    target[places] = np.frombuffer(body[count + 4 * long :], f"u{word}")


def _words(data: memoryview, word: int) -> Words:
    return np.frombuffer(data, f"u{word}")
