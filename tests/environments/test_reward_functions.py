"""How reward functions may be written, and what each mistake in one says."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.environments.rewards import RewardError, RewardFunction, as_score
from laminar.errors import UserError
from laminar.trajectory import Prompt, Score

PROMPT = Prompt(id="sums-0", text="2+3=", row={"question": "2+3=", "solution": "5", "level": 2})


def scored(function: Callable[..., object], response: str = "5") -> Score:
    return RewardFunction(function, answer="solution")(response, PROMPT)


def test_a_reward_is_given_what_its_parameters_name() -> None:
    asked: dict[str, Any] = {}

    def everything(response, completion, answer, prompt, row, level):  # type: ignore[no-untyped-def]
        names = ("response", "completion", "answer", "prompt", "row", "level")
        asked.update(zip(names, (response, completion, answer, prompt, row, level), strict=True))
        return 1

    assert scored(everything).reward == 1.0
    assert asked == {
        "response": "5",
        "completion": "5",
        "answer": "5",
        "prompt": "2+3=",
        "row": PROMPT.row,
        "level": 2,
    }


def test_a_reward_may_take_positional_default_and_keyword_parameters() -> None:
    def positional(response, answer, /, weight=2.0):  # type: ignore[no-untyped-def]
        return weight * (response == answer)

    def last(weight=2.0, answer="", /):  # type: ignore[no-untyped-def]
        return weight * (answer == "5")

    def keywords(response, **columns):  # type: ignore[no-untyped-def]
        return float(response == columns["solution"] and columns["level"] == 2)

    class Judge:
        def __call__(self, response: str, answer: str) -> bool:
            return response == answer

    assert scored(positional).reward == 2.0
    assert scored(keywords).reward == 1.0
    assert scored(last).reward == 2.0
    assert scored(functools.partial(positional, weight=3.0)).reward == 3.0
    assert scored(Judge()).reward == 1.0
    assert scored(lambda response, answer: response == answer, "6").reward == 0.0


def test_a_reward_in_the_manner_of_trl_gets_lists_of_one() -> None:
    asked: dict[str, Any] = {}

    def trl(completions, prompts, solution, **kwargs):  # type: ignore[no-untyped-def]
        asked.update(completions=completions, prompts=prompts, solution=solution, **kwargs)
        return [0.25]

    assert scored(trl).reward == 0.25
    assert asked == {
        "completions": ["5"],
        "prompts": ["2+3="],
        "solution": ["5"],
        "answer": ["5"],
        "question": ["2+3="],
        "level": [2],
    }
    assert scored(lambda completions, **kwargs: [None]).status == "skipped"


@pytest.mark.parametrize("returned", [[1.0, 0.0], [], 1.0, "1"])
def test_a_list_of_the_wrong_length_is_never_taken_for_the_whole_group(returned: object) -> None:
    """TRL #6533: one value was given to all."""

    def my_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
        return returned

    with pytest.raises(RewardError, match=r"^reward `my_reward` returned .*; expected a list of one number or None"):
        scored(my_reward)


def test_none_drops_the_row_and_is_never_zero() -> None:
    """TRL #2737."""
    score = scored(lambda response: None)
    assert (score.reward, score.status) == (None, "skipped")


def test_a_dict_is_named_parts_whose_sum_is_the_reward() -> None:
    score = scored(lambda response: {"right": True, "short": 0.5})
    assert score.reward == 1.5
    assert score.parts == {"right": 1.0, "short": 0.5}


def test_numbers_of_numpy_and_of_fractions_are_numbers() -> None:
    for number in (np.float32(0.5), np.bool_(True), np.int64(3), np.array(0.25), Fraction(1, 4)):
        assert as_score(number, "reward `f`").reward == float(number)


def coroutine() -> object:
    async def later() -> float:
        return 1.0

    made = later()
    made.close()
    return made


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("0.5", "a str ('0.5')"),
        ([1.0], "a list of 1"),
        (math.nan, "a float (nan)"),
        (math.inf, "a float (inf)"),
        (10**400, "a int (1000"),
        (1j, "a complex (1j)"),
        ({}, "an empty dict"),
        ({"right": "yes"}, "a str ('yes') under 'right'"),
        ({"right": None}, "a NoneType (None) under 'right'"),
        ({"a": 1e308, "b": 1e308}, "a float (inf) as the sum"),
        (coroutine(), "a coroutine ("),
        (np.array([1.0]), "a ndarray ("),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function(returned: object, what: str) -> None:
    def my_reward(response: str) -> object:
        return returned

    with pytest.raises(RewardError, match="^reward `my_reward` returned " + re.escape(what)) as raised:
        scored(my_reward)
    assert "\n" not in str(raised.value)
    assert "expected a number, None to skip the row, or a dict of named numbers" in str(raised.value)


def test_a_reward_that_raises_is_named_with_the_line_that_raised() -> None:
    def my_reward(response: str) -> float:
        return float({}["missing"])

    with pytest.raises(
        RewardError, match=r"^reward `my_reward` raised KeyError: 'missing' \(in my_reward, line \d+\)$"
    ):
        scored(my_reward)


def test_an_exception_without_a_text_is_named_all_the_same() -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise ValueError

    def my_reward(response: str) -> float:
        raise Speechless

    with pytest.raises(RewardError, match=r"`my_reward` raised Speechless: \(its text cannot be had\) \(in my_reward"):
        scored(my_reward)


def test_an_unknown_parameter_is_told_with_the_valid_names() -> None:
    def check(function: Callable[..., object]) -> None:
        RewardFunction(function, answer="solution").check_parameters(PROMPT.row)

    check(lambda response, level, extra=1, **kwargs: 1.0)
    with pytest.raises(UserError, match=r"parameter 'respnse'; expected any of answer, .*; did you mean 'response'\?"):
        check(lambda respnse, answer: 1.0)
    with pytest.raises(UserError, match="parameter 'response'; expected any of answer, completions, "):
        check(lambda completions, response: [1.0])


def test_a_function_that_cannot_be_called_is_refused_at_once() -> None:
    async def later(response: str) -> float:
        return 1.0

    class Later:
        async def __call__(self, response: str) -> float:
            return 1.0

    with pytest.raises(UserError, match="reward `later` is async"):
        RewardFunction(later, answer="answer")
    with pytest.raises(UserError, match="reward `Later` is async"):
        RewardFunction(Later(), answer="answer")
    with pytest.raises(UserError, match=r"takes \*args alone; name what it is given"):
        RewardFunction(lambda *args: 1.0, answer="answer")
    with pytest.raises(UserError, match="is not a function"):
        RewardFunction("exact", answer="answer")  # type: ignore[arg-type]


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60) | st.booleans())
def test_every_finite_number_is_its_own_reward(number: float) -> None:
    assert as_score(number, "reward `f`").reward == float(number)
    assert as_score(Score(reward=number), "environment `e`").reward == float(number)
