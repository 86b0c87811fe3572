"""The committed base model: what the quickstart and other tests start from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows import train_base

CHECKPOINT = Path(train_base.__file__).parent / "models" / "running-sums"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT)


def test_the_checkpoint_is_a_small_qwen3_in_float32(model):
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 6_000_000
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32


def test_the_text_of_questions_and_answers_survives_the_tokenizer(tokenizer):
    rng = random.Random(1)
    for _ in range(100):
        terms, signs = train_base.draw_sum(rng)
        answer = train_base.write_worked(terms, signs, rng, slip=0.1)
        for text in (train_base.write_question(terms, signs), answer, train_base.write_guess(terms, signs, rng)):
            tokens = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in tokens
            assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode("Any other (ASCII) text?\n")) == "Any other (ASCII) text?\n"


def test_the_chat_template_ends_the_question_with_a_newline(tokenizer):
    messages = [{"role": "user", "content": "1 + 2 ="}]
    for add_generation_prompt in (False, True):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert text == "1 + 2 =\n"


def test_the_committed_tokenizer_is_the_one_the_script_builds(tokenizer):
    assert tokenizer.get_vocab() == train_base.build_tokenizer().get_vocab()


def test_the_model_solves_some_of_the_held_out_problems_and_not_all(model, tokenizer):
    torch.manual_seed(0)
    greedy, _ = train_base.evaluate(model, tokenizer, problems=64, sample=False)
    sampled, lengths = train_base.evaluate(model, tokenizer, problems=64, sample=True)
    assert greedy >= 0.12
    assert 0.12 <= sampled <= 0.6
    assert max(lengths) <= train_base.MAX_NEW_TOKENS
