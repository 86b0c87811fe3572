"""Text of an answer: without what ends it, and with all of the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from laminar.rollout.tokens import decode, load_tokenizer

MODEL = Path(__file__).parents[2] / "flows" / "models" / "running-sums"
EOS = 1


def checkpoint(folder: Path, *, generation: object = None, model: object = None) -> str:
    """The tokenizer, with these ``eos_token_id`` in the generation config and the model's config."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": model}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return str(folder)


@pytest.mark.parametrize(
    "stops",
    [{"generation": [EOS, 7]}, {"model": [EOS, 7]}, {"generation": 7, "model": 3}, {"generation": 7}],
    ids=["several", "of the model", "the generation config comes first", "not the tokenizer's"],
)
def test_every_token_that_ends_an_answer_of_this_model_is_no_part_of_its_text(tmp_path: Path, stops) -> None:
    """TRL PR #7039: only one EOS id is honoured."""
    tokenizer = load_tokenizer(checkpoint(tmp_path, **stops))
    text = decode(tokenizer, [10, 7, 11])
    assert text == tokenizer.decode([10, 7, 11]), "inside an answer it is text"
    assert decode(tokenizer, [10, 7, 11, 7]) == decode(tokenizer, [10, 7, 11, EOS]) == text


def test_a_token_that_ends_nothing_stays(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint(tmp_path, generation=EOS))
    assert decode(tokenizer, [10, 7]) == tokenizer.decode([10, 7])
    assert decode(tokenizer, []) == ""
