"""Several environments as one: each prompt is scored by its own, each part has its share."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

from laminar.environments.mixture import mix
from laminar.environments.reasoning_gym import reasoning_gym
from laminar.errors import UserError
from laminar.experience.prompt_pool import PromptPool, Source

SUMS = reasoning_gym("chain_sum", size=12, min_terms=2, max_terms=3)
LETTERS = reasoning_gym("letter_counting", size=5)


def test_prompts_are_scored_by_the_environment_that_they_came_from() -> None:
    mixed = pickle.loads(pickle.dumps(mix((SUMS, 3), (LETTERS, 1))))
    for index, (own, place) in {0: (SUMS, 0), 11: (SUMS, 11), 12: (LETTERS, 0), 16: (LETTERS, 4)}.items():
        prompt = mixed.prompt(index)
        assert prompt.text == own.prompt(place).text
        right, wrong = mixed.trial_responses(prompt)
        assert (mixed.score(prompt, right), mixed.score(prompt, wrong)) == (
            own.score(own.prompt(place), right),
            own.score(own.prompt(place), wrong),
        )
    assert len({mixed.prompt(index).id for index in range(len(mixed))}) == 17


def test_each_part_is_drawn_by_its_weight() -> None:
    mixed = mix((SUMS, 3), (LETTERS, 1))
    draws = PromptPool(Source.of(mixed), seed=0).take(40)
    assert Counter(draw.index < 12 for draw in draws) == {True: 30, False: 10}


def test_another_weight_or_part_is_another_fingerprint() -> None:
    prints = {mix((SUMS, 3), (LETTERS, 1)).fingerprint(), mix((SUMS, 2), (LETTERS, 1)).fingerprint()}
    assert len(prints | {mix((SUMS, 3)).fingerprint()}) == 3
    assert mix((SUMS, 3)).fingerprint() == mix((SUMS, 3.0)).fingerprint()


@pytest.mark.parametrize(
    ("parts", "why"),
    [((), "no environments given"), ((SUMS,), "expected a pair"), (((SUMS, 0),), "the weight of `chain_sum` is 0")],
)
def test_what_cannot_be_mixed_is_one_line(parts: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        mix(*parts)
