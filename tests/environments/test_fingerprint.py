"""A fingerprint changes with what it stands for, and with nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from laminar.environments.fingerprint import fingerprint

SOURCE = """
import re
WORDS = {"one", "two", "three"}
NUMBER = re.compile("[0-9]+")
def helper(text):
    return len(text) * 2
def reward(response, answer, weight=1.0):
    return weight * helper(response) * bool(NUMBER.search(answer)) + (response in WORDS)
"""


def reward_of(source: str) -> Callable[..., float]:
    module = types.ModuleType("a_flow_file")
    exec(source, module.__dict__)
    function: Callable[..., float] = module.reward
    return function


def test_code_counts_and_its_place_does_not() -> None:
    original = fingerprint(reward_of(SOURCE))
    assert fingerprint(reward_of("\n\n# a comment\n" + SOURCE + "\ndef unused(): ...\n")) == original


def test_an_edit_anywhere_in_the_code_that_is_used_counts() -> None:
    edits = [("* 2", "* 3"), ("weight=1.0", "weight=2.0"), ("[0-9]+", "[a-z]+"), ('"three"', '"four"'), ("+ (", "- (")]
    prints = {fingerprint(reward_of(SOURCE.replace(*edit))) for edit in edits}
    assert len(prints) == len(edits)
    assert fingerprint(reward_of(SOURCE)) not in prints


def test_a_closure_and_a_class_count_by_what_they_hold() -> None:
    def above(limit: float) -> Callable[[float], bool]:
        return lambda value: value > limit

    assert fingerprint(above(1)) == fingerprint(above(1)) != fingerprint(above(2))

    def judge(limit: int) -> type:
        class Judge:
            least = limit

            def __call__(self, response: str) -> bool:
                return len(response) > self.least

        return Judge

    assert fingerprint(judge(1)) == fingerprint(judge(1)) != fingerprint(judge(2))
    assert fingerprint(judge(1)()) == fingerprint(judge(1)())
    assert fingerprint(judge(1)().__call__) != fingerprint(judge(2)().__call__)


def test_functions_that_all_use_each_other_take_no_time() -> None:
    """Walked along every path, forty would outlast the universe."""
    names = [f"f{n}" for n in range(40)]
    source = "".join(f"def {name}(x): return [{', '.join(names)}][x]\n" for name in names)
    whole = "def reward(response): return f0(len(response))\n" + source
    assert fingerprint(reward_of(whole)) == fingerprint(reward_of(whole))
    edited = whole.replace("def f39(x): return [", "def f39(x): return ['more', ")
    assert fingerprint(reward_of(whole)) != fingerprint(reward_of(edited))


def test_a_function_in_a_set_that_it_uses_itself_has_a_fingerprint() -> None:
    source = "def reward(response): return [rule(response) for rule in RULES if rule is not reward]\n"
    assert fingerprint(reward_of(f"{source}RULES = {{reward, len, max}}\n"))


def test_it_is_the_same_in_every_process() -> None:
    script = (
        "from tests.environments.test_fingerprint import SOURCE, reward_of\n"
        "from laminar.environments.fingerprint import fingerprint\n"
        "print(fingerprint(reward_of(SOURCE), {'a': {1, 'x'}}))"
    )
    expected = fingerprint(reward_of(SOURCE), {"a": {1, "x"}})
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_equal_values_and_only_those_have_equal_fingerprints(one: object, other: object) -> None:
    assert re.fullmatch("[0-9a-f]{32}", fingerprint(one))
    assert (fingerprint(one) == fingerprint(other)) == (repr(one) == repr(other) or _sorted(one) == _sorted(other))


def _sorted(value: object) -> object:
    """A value with its dicts in the order of their keys, and True apart from 1."""
    if isinstance(value, dict):
        return ("dict", [(key, _sorted(value[key])) for key in sorted(value)])
    if isinstance(value, list):
        return ("list", [_sorted(item) for item in value])
    return (type(value).__name__, value)
