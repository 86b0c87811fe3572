"""How a user's reward function is called, and what it may return."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from laminar.environments.described import described
from laminar.environments.pickling import dumps_by_value, is_installed, revive
from laminar.errors import UserError
from laminar.suggest import did_you_mean, listed
from laminar.trajectory import Prompt, Score

__all__ = ["RewardError", "RewardFunction", "as_score"]

_EXPECTED = "a number, None to skip the row, or a dict of named numbers"
_EXPECTED_LIST = "a list of one number or None (it was called with one completion)"
_GIVEN = ("response", "completion", "answer", "prompt", "row")
_GIVEN_LISTS = ("completions", "prompts", "answer")


class RewardError(Exception):
    """A reward function raised, or returned what no reward can be. One line that names the function."""


class RewardFunction:
    """A user's reward function, with the ways in which it may be written.

    By parameter names: any of ``response`` (the model's text; also ``completion``), ``answer`` (the row's answer),
    ``prompt`` (its text), ``row`` (the whole row), and any column of the data set. These names win over a column of
    the same name. It returns a number, None to skip the row, or a dict of named numbers whose sum is the reward.

    In the manner of TRL, if it has a parameter ``completions``: then ``completions``, ``prompts`` and every column
    are lists, of one element here, and it returns a list of one number or None.

    Parameters
    ----------
    function
        Any callable with a signature; not ``async``.
    answer
        Name of the column that is given as ``answer``.

    Raises
    ------
    UserError
        The function is ``async``, is not callable, or has no signature.
    """

    def __init__(self, function: Callable[..., object], *, answer: str) -> None:
        if not callable(function):
            raise UserError(f"reward={function!r} is not a function; expected e.g. reward=my_reward")
        self.function = function
        self.answer = answer
        self.label = f"reward `{_name(function)}`"
        if _is_async(function):
            raise UserError(f"{self.label} is async; expected a plain function (it runs in a process of its own)")
        try:
            self._signature = inspect.signature(function)
        except ValueError as error:
            raise UserError(f"{self.label} has no signature; wrap it: lambda response, answer: ...") from error
        if [parameter.kind for parameter in self._signature.parameters.values()] == [inspect.Parameter.VAR_POSITIONAL]:
            raise UserError(f"{self.label} takes *args alone; name what it is given: lambda response, answer: ...")

    @property
    def is_batched(self) -> bool:
        """Whether it is written for lists, in the manner of TRL."""
        return "completions" in self._signature.parameters

    @property
    def uses_answer(self) -> bool:
        """Whether it cannot be called without an ``answer``."""
        return "answer" in self._required()

    def check_parameters(self, columns: Iterable[str]) -> None:
        """Raise a UserError if a parameter without a default is neither one of ours nor a column."""
        columns = list(columns)
        valid = sorted({*(_GIVEN_LISTS if self.is_batched else _GIVEN), *columns})
        for name in self._required():
            if name not in valid:
                hint = did_you_mean(name, valid)
                raise UserError(f"{self.label} has a parameter '{name}'; expected any of {listed(valid)}{hint}")

    def __call__(self, response: str, prompt: Prompt) -> Score:
        """Score one response.

        Raises
        ------
        RewardError
            The function raised, or returned what no reward can be.
        """
        values = self._values(response, prompt)
        positional, named = self._arguments(values)
        try:
            result = self.function(*positional, **named)
        except Exception as error:
            raise RewardError(f"{self.label} raised {described(error)}") from error
        if self.is_batched:
            result = self._only(result)
        return as_score(result, self.label)

    def _values(self, response: str, prompt: Prompt) -> dict[str, Any]:
        """Everything that the function may ask for, by name."""
        values: dict[str, Any] = dict(prompt.row)
        if self.answer in prompt.row:
            values["answer"] = prompt.row[self.answer]
        if self.is_batched:
            values |= {"prompts": prompt.text, "completions": response}
            return {name: [value] for name, value in values.items()}
        return values | {"response": response, "completion": response, "prompt": prompt.text, "row": prompt.row}

    def _arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments: what the signature names, or everything if it takes ``**kwargs``."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= {key: value for key, value in values.items() if key not in self._signature.parameters}
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(values.get(name, parameter.default))
            elif name not in values or parameter.kind is parameter.VAR_POSITIONAL:
                continue
            else:
                named[name] = values[name]
        return positional, named

    def _required(self) -> list[str]:
        optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = self._signature.parameters.values()
        return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]

    def _only(self, result: object) -> object:
        """The one element of a list returned by a batched function."""
        if not isinstance(result, (list, tuple)):
            raise RewardError(f"{self.label} returned {_shown(result)}; expected {_EXPECTED_LIST}")
        if len(result) != 1:
            raise RewardError(f"{self.label} returned a list of {len(result)}; expected {_EXPECTED_LIST}")
        return result[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner: Any = self.function
        while isinstance(owner, functools.partial):
            owner = owner.func
        if is_installed(owner.__module__ or ""):
            return super().__reduce_ex__(protocol)
        return revive, (dumps_by_value((type(self), self.__dict__), owner=owner),)


def as_score(result: object, label: str) -> Score:
    """Make a Score of what a reward function returned.

    Parameters
    ----------
    label
        What the message calls the function, e.g. ``reward `my_reward```.

    Raises
    ------
    RewardError
        It is no number, None or dict of named numbers, or it is not finite.

    Example
    -------
    >>> as_score({"right": 1, "short": 0.5}, "reward `f`").reward
    1.5
    >>> as_score(None, "reward `f`").status
    'skipped'
    >>> as_score("0.5", "reward `f`")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    laminar.environments.rewards.RewardError: reward `f` returned a str ('0.5'); expected a number, ...
    """
    if isinstance(result, Score):
        return _checked(result, label)
    if result is None:
        return Score(reward=None, status="skipped", message=f"{label} returned None")
    if isinstance(result, dict):
        if not result:
            raise RewardError(f"{label} returned an empty dict; expected {_EXPECTED}")
        parts = {str(name): _number(value, label, f" under '{name}'") for name, value in result.items()}
        return Score(reward=_number(sum(parts.values()), label, " as the sum"), parts=parts)
    return Score(reward=_number(result, label, ""))


def _checked(score: Score, label: str) -> Score:
    """A Score that an environment made itself: its numbers have to be numbers all the same."""
    if score.reward is None:
        return replace(score, status="skipped") if score.status == "ok" else score
    parts = {str(name): _number(value, label, f" under '{name}'") for name, value in score.parts.items()}
    return replace(score, reward=_number(score.reward, label, ""), parts=parts)


def _number(value: object, label: str, place: str) -> float:
    """A finite float of any real scalar: Python's, numpy's, or a tensor without dimensions."""
    scalar = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(scalar, numbers.Real):
        try:
            number = float(scalar)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise RewardError(f"{label} returned {_shown(value)}{place}; expected {_EXPECTED}")


def _shown(value: object) -> str:
    """A value in a message: its type, and what it is, cut short."""
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    text = " ".join(repr(value).split())
    return f"a {type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


def _name(function: object) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def _is_async(function: Callable[..., object]) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(function) or kind(type(function).__call__) for kind in kinds)
