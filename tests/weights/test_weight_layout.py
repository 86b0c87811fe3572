"""The flat buffer's map: nothing overlaps, everything is aligned, the same text gives the same layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import LaminarError
from laminar.weights.layout import ALIGNMENT, Layout, TensorSpec, engine_order

DTYPES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(st.lists(st.text("abc._", min_size=1), min_size=1, max_size=8, unique=True))
    specs = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        elements = torch.Size(shape).numel()
        specs.append(TensorSpec(name, dtype, shape, elements * DTYPES[dtype]))
    specs.append(TensorSpec("something", "int8", (5,), 5))  # a layout of no bytes at all is none
    return Layout.pack(specs, chunk_bytes=draw(st.sampled_from([64, 128, 4096])))


@given(layouts())
def test_tensors_are_aligned_and_never_overlap(layout: Layout) -> None:
    end = 0
    for spec in layout.tensors:
        assert spec.offset % ALIGNMENT == 0
        assert spec.offset >= end
        end = spec.offset + spec.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT


@given(layouts())
def test_a_layout_survives_json_and_keeps_its_hash(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.hash == layout.hash


@given(layouts())
def test_pieces_cover_every_byte_of_every_tensor_once_and_stay_in_their_chunk(layout: Layout) -> None:
    covered = {spec.name: 0 for spec in layout.tensors}
    chunks = list(layout.pieces())
    assert len(chunks) == layout.chunks
    for chunk, pieces in enumerate(chunks):
        start, stop = layout.span(chunk)
        for piece in pieces:
            spec = layout.tensors[piece.tensor]
            assert covered[spec.name] == piece.source
            assert start + piece.target == spec.offset + piece.source
            assert start + piece.target + piece.nbytes <= stop
            covered[spec.name] += piece.nbytes
    assert covered == {spec.name: spec.nbytes for spec in layout.tensors}


LAYER = [f"layers.3.self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")]
LAYER += [f"layers.3.mlp.{p}_proj.weight" for p in ("gate", "up", "down")] + ["layers.3.norm.weight"]


@given(st.permutations(LAYER))
def test_q_k_v_and_gate_up_stand_side_by_side_whatever_order_they_come_in(names: list[str]) -> None:
    order = engine_order(names)
    assert sorted(order) == sorted(names)
    for kind in ("weight", "bias"):
        first = order.index(f"layers.3.self_attn.q_proj.{kind}")
        assert order[first : first + 3] == [f"layers.3.self_attn.{p}_proj.{kind}" for p in "qkv"]
    first = order.index("layers.3.mlp.gate_proj.weight")
    assert order[first + 1] == "layers.3.mlp.up_proj.weight"


def test_tensors_that_are_not_fused_keep_the_order_they_came_in() -> None:
    names = ["embed.weight", "layers.0.norm.weight", "layers.0.mlp.down_proj.weight", "lm_head.weight"]
    assert engine_order(names) == names


def test_a_layout_of_tensors_says_dtypes_as_torch_spells_them() -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(4, dtype=torch.float8_e4m3fn),
        "c": torch.zeros((), dtype=torch.int64),
    }
    layout = Layout.of(tensors)
    assert [(s.name, s.dtype, s.shape, s.nbytes) for s in layout.tensors] == [
        ("a", "bfloat16", (3, 5), 30),
        ("b", "float8_e4m3fn", (4,), 4),
        ("c", "int64", (), 8),
    ]


def test_a_layout_notices_tensors_that_are_not_its_own() -> None:
    layout = Layout.of({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(LaminarError, match="tensor b is missing"):
        layout.check({"a": torch.zeros(3)})
    with pytest.raises(LaminarError, match=r"tensor a is float32 \(4,\), the layout says float32 \(3,\)"):
        layout.check({"a": torch.zeros(4), "b": torch.zeros(2)})
    with pytest.raises(LaminarError, match="tensor a is bfloat16"):
        layout.check({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2)})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tensors": [{"name": "a"}], "nbytes": 64, "chunk_bytes": 64},
        {"tensors": [], "nbytes": 64, "chunk_bytes": 64},
        {
            "tensors": [
                {"name": "a", "dtype": "int8", "shape": [65], "nbytes": 65, "offset": 0},
                {"name": "b", "dtype": "int8", "shape": [1], "nbytes": 1, "offset": 64},
            ],
            "nbytes": 128,
            "chunk_bytes": 64,
        },
    ],
    ids=["empty", "fields missing", "no tensors", "tensors overlap"],
)
def test_values_that_make_no_layout_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Layout.from_dict(values)
