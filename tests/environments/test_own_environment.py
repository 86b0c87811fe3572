"""An environment of the user's own class: what is wrong with it is one line before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from laminar.environments import Environment
from laminar.errors import UserError
from laminar.trajectory import Prompt, Score


class Squares(Environment):
    """Right as it is; the tests make it wrong."""

    name = "squares"

    def __len__(self) -> int:
        return 3

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=f"squares-{index}", text=f"{index}*{index}=", row={"answer": index * index})

    def score(self, prompt: Prompt, response: str) -> Score:
        return Score(reward=float(response == str(prompt.row["answer"])))


def raising(*_: object) -> Any:
    """A method of a user's that does not work."""
    raise KeyError("x")


def giving(value: object) -> Callable[..., Any]:
    """A method that returns just this."""
    return lambda *_: value


def test_an_environment_that_works_passes_its_check() -> None:
    Squares().check()


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("name", None, "environment class `Squares` has no name; give it one"),
        ("__len__", giving(0), "environment `squares` has no prompts"),
        ("__len__", giving(2.5), r"environment `squares`: len\(\) raised TypeError: 'float'"),
        ("__len__", raising, r"environment `squares`: len\(\) raised KeyError: 'x' \(in raising, line"),
        ("prompt", raising, r"environment `squares`: prompt\(0\) raised KeyError: 'x' \(in raising, line"),
        ("prompt", giving("0*0="), r"prompt\(0\) is a str; expected a Prompt"),
        ("prompt", giving(Prompt("a", 5, {})), r"prompt\(0\).text is a int; expected a str"),  # type: ignore[arg-type]
        ("prompt", giving(Prompt("a", "b", None)), r"prompt\(0\).row is a NoneType; expected a dict"),  # type: ignore[arg-type]
        ("trial_responses", raising, r"environment `squares`: trial_responses\(\) raised KeyError"),
        ("prepare", raising, "environment `squares` could not be loaded in its own process: KeyError: 'x'"),
        ("score", raising, "environment `squares` raised KeyError: 'x'"),
        ("score", giving("1"), r"environment `squares` returned a str \('1'\); expected a number"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, method: Callable[..., Any] | None, message: str
) -> None:
    monkeypatch.setattr(Squares, name, method)
    with pytest.raises(UserError, match=message) as raised:
        Squares().check()
    assert "\n" not in str(raised.value)
