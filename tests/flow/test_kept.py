"""What a kept result is found by: the code, also of helpers in the same file, the inputs, the version."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from laminar.flow.kept import Identity, Kept, Unreadable, Unwritable, identity_of, read, result_key, write
from laminar.flow.load import load_flow

SOURCE = """
import functools
import laminar as lm
import math
from pathlib import Path

SCALE = 3
UNUSED = 1
WORDS = {"one", "two"}
FOLDER = Path("data")
TABLE = {("a", 1): 2}
LOOP = {}
LOOP["itself"] = LOOP

class Box:
    def grow(self, x):
        return x + 1

class Rule:
    limit = 5
    def __init__(self, least):
        self.least = least
    def __call__(self, x):
        return max(self.least, min(x, self.limit))

def power(x, n):
    return x ** n

square = functools.partial(power, n=2)
rule = Rule(1)

def helper(x):
    return square(rule(Box().grow(x) * SCALE)) + len(WORDS) + len(LOOP), FOLDER, TABLE

def unrelated(x):
    return x

@lm.task
def work(size: int) -> float:
    return helper(math.floor(size))

@lm.flow
def demo(size: int = 1):
    return work(size)
"""


def code_of(folder, source):
    folder.mkdir(exist_ok=True)
    (folder / "flow.py").write_text(source)
    return load_flow(str(folder / "flow.py")).function.__globals__["work"].identity


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("math.floor(size)", "math.floor(size + 1)", False),
        ("Box().grow(x) * SCALE", "Box().grow(x) + SCALE", False),
        ("SCALE = 3", "SCALE = 4", False),
        ("return x + 1", "return x + 2", False),
        ('"one", "two"', '"one", "six"', False),
        ('Path("data")', 'Path("other")', False),
        ('("a", 1): 2', '("a", 2): 2', False),
        ("limit = 5", "limit = 6", False),
        ("min(x, self", "min(-x, self", False),
        ("Rule(1)", "Rule(2)", False),
        ("n=2", "n=3", False),
        ("x ** n", "x * n", False),
        ('"one", "two"', '"two", "one"', True),
        ("return x ** n", "return x ** n  # as it was", True),
        ("UNUSED = 1", "UNUSED = 2\n\n", True),
        ("def unrelated(x):\n    return x", "def unrelated(x):\n    return -x", True),
    ],
)
def test_a_change_of_code_that_a_task_uses_changes_its_identity(tmp_path, old, new, same):
    before = code_of(tmp_path / "a", SOURCE)
    after = code_of(tmp_path / "b", SOURCE.replace(old, new))
    assert (before == after) is same


def test_a_module_beside_the_flow_file_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_it.py").write_text("def double(x):\n    return 2 * x\n")
    source = "import laminar as lm\nimport beside_it\n\n@lm.task\ndef work(x):\n    return beside_it.double(x)\n"
    before = code_of(tmp_path / "a", source + "\n@lm.flow\ndef demo():\n    pass\n")
    (tmp_path / "beside_it.py").write_text("def double(x):\n    return x + x + 0\n")
    monkeypatch.delitem(sys.modules, "beside_it")
    assert code_of(tmp_path / "b", source + "\n@lm.flow\ndef demo():\n    pass\n") != before


def test_a_task_that_another_one_calls_counts_whatever_was_asked_of_it_before(tmp_path):
    source = SOURCE.replace("helper(math", "other(math") + "\n@lm.task\ndef other(x):\n    return helper(x)\n"
    before = code_of(tmp_path / "a", source)
    globals_ = load_flow(str(tmp_path / "a" / "flow.py")).function.__globals__
    assert globals_["other"].identity and globals_["work"].identity == before
    assert code_of(tmp_path / "b", source.replace("return x + 1", "return x + 2")) != before


def test_identity_sees_enclosing_variables():
    def made(n):
        def work():
            return n

        return work

    assert identity_of(made(1)) != identity_of(made(2))
    assert identity_of(made(1)) == identity_of(made(1))


def test_functions_that_use_each_other_have_an_identity():
    assert identity_of(even).name == "even"


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def test_the_key_is_the_same_in_every_process():
    program = (
        "from laminar.flow.kept import Identity, result_key\n"
        "print(result_key(Identity('work', 'abc'), ({'b': 1, 'a': {3, 'x'}},), {'size': 2}))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {result_key(Identity("work", "abc"), ({"a": {"x", 3}, "b": 1},), {"size": 2})}


def test_other_inputs_are_another_result():
    identity = Identity("work", "abc")
    keys = {result_key(identity, (1,), {}), result_key(identity, (2,), {}), result_key(identity, (1,), {"b": 1})}
    assert len(keys) == 3


def test_a_result_comes_back_with_the_run_that_made_it(tmp_path):
    write(str(tmp_path), "k", Kept("run-1", lambda: 7))
    found = read(str(tmp_path), "k")
    assert found is not None and found.run_id == "run-1" and found.result() == 7
    assert read(str(tmp_path), "other") is None


def test_a_damaged_result_is_told_apart_from_a_missing_one(tmp_path):
    write(str(tmp_path), "k", Kept("run-1", [1, 2, 3]))
    file = tmp_path / "tasks" / "k.pkl"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(Unreadable, match=r"tasks/k.pkl cannot be read"):
        read(str(tmp_path), "k")


def test_a_result_that_cannot_be_pickled_is_told(tmp_path):
    with pytest.raises(Unwritable, match="TypeError: cannot pickle"):
        write(str(tmp_path), "k", Kept("run-1", threading.Lock()))
