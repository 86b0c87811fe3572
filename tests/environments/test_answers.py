"""Finding the answer in a response, and comparing it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.environments import exact_match, extract_answer, math_equal


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2\n</answer>", "2"),
        ("<answer>a <answer>3</answer>", "3"),
        (" plain \n", "plain"),
        ("<answer>never closed", "<answer>never closed"),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_tagged_answer_counts_or_else_the_whole_response(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


@given(st.text(), st.text(alphabet="7x+ \n\\"))
def test_a_tagged_answer_is_found_after_any_text(before: str, answer: str) -> None:
    assert extract_answer(f"{before}<answer>{answer}</answer>") == answer.strip()


def test_exact_match_compares_letter_by_letter() -> None:
    assert exact_match("so <answer>7</answer>", 7) == 1.0
    assert exact_match("7.0", "7") == 0.0
    assert exact_match("", "7") == 0.0


CASES = [
    (r"The answer is $\frac{2}{4}$.", "1/2", 1.0),
    ("so it is 0.5", r"\frac{1}{2}", 1.0),
    (r"\boxed{x + 1}", "1 + x", 1.0),
    ("<answer>1+x</answer>", "x+1", 1.0),
    ("<answer>0.6</answer>", "1/2", 0.0),
    ("I do not know", "1/2", 0.0),
    ("", "1/2", 0.0),
]


@pytest.mark.parametrize(("response", "answer", "reward"), CASES)
def test_equal_mathematics_is_equal(response: str, answer: str, reward: float) -> None:
    assert math_equal(response, answer) == reward


def test_mathematics_is_compared_the_same_off_the_main_thread() -> None:
    """verl PR #5635: its alarm made every score off the main thread 0, silently."""
    with ThreadPoolExecutor(1) as thread:
        scores = [thread.submit(math_equal, response, answer).result(timeout=30) for response, answer, _ in CASES]
    assert scores == [reward for *_, reward in CASES]


@pytest.mark.parametrize("reward", [exact_match, math_equal])
def test_a_row_without_an_answer_is_not_silently_zero(reward: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="the row has no answer"):
        reward("None", None)


def test_an_answer_that_is_no_mathematics_is_not_silently_zero() -> None:
    with pytest.raises(ValueError, match="the row's answer '' is no mathematical expression"):
        math_equal("5", "")
