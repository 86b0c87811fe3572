"""Changes between two versions: whatever changed, the bytes come out the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import LaminarError
from laminar.weights import delta


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5000),
    st.floats(0, 1),
    st.integers(0, 1 << 30),
)
def test_changes_make_the_new_version_of_the_old_to_the_bit(word: int, words: int, share: float, seed: int) -> None:
    delta_block, delta.BLOCK_BYTES = delta.BLOCK_BYTES, 4096  # many blocks of few words
    try:
        random = np.random.default_rng(seed)
        old = random.integers(0, 256, words * word, dtype=np.uint8)
        new = old.copy()
        changed = random.random(words) < share
        new.reshape(words, word)[changed] = random.integers(0, 256, (int(changed.sum()), word), dtype=np.uint8)
        changes = delta.encode(memoryview(old), memoryview(new), word)
        delta.apply(memoryview(old), memoryview(changes))
        assert (old == new).all()
    finally:
        delta.BLOCK_BYTES = delta_block


def test_a_hundredth_of_bfloat16_weights_takes_a_sixtieth_of_the_bytes() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 8 << 20, dtype=np.uint16)
    new = old.copy()
    new[random.integers(0, len(new), len(new) // 100)] ^= 1
    changes = delta.encode(memoryview(old).cast("B"), memoryview(new).cast("B"), 2)
    assert len(changes) < new.nbytes / 60
    share = delta.sampled_share(memoryview(old).cast("B"), memoryview(new).cast("B"), 2)
    assert share == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("cut", [1, 15, 40])
def test_changes_that_are_cut_short_are_refused(cut: int) -> None:
    old, new = bytearray(1 << 12), bytearray(range(256)) * 2 + bytearray((1 << 12) - 512)
    changes = delta.encode(memoryview(old), memoryview(new), 2)
    with pytest.raises(LaminarError):
        delta.apply(memoryview(old), memoryview(changes)[:-cut])
