"""A flow's parameters: from the signature, the same from Python, from the command line and from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from laminar.cli.options import OWN_OPTIONS, parse
from laminar.errors import UserError
from laminar.flow.docstring import parameter_help
from laminar.flow.parameters import RESERVED, Parameter, parameters_of, resolve
from laminar.flow.params_file import read_params


def every_kind(
    steps: int,
    lr: float = 1,
    fast: bool = False,
    name: str = "base",
    mode: Literal["sync", "stream", 3] = "sync",
    out: Path = Path("runs"),
    ceiling: Optional[int] = None,  # noqa: UP045
    sloppy: int = None,  # noqa: RUF013
    untyped=0.5,
):
    """Train.

    Parameters
    ----------
    steps : int
        Optimizer steps,
        in all.
    lr, untyped
        Rates.

    Args:
        fast (bool): Hurry
            up.
    out: where the files go
    """


def test_types_defaults_and_help_come_from_the_function():
    found = {p.name: p for p in parameters_of(every_kind)}
    assert {name: p.type_name for name, p in found.items()} == {
        "steps": "int",
        "lr": "float",
        "fast": "bool",
        "name": "str",
        "mode": "sync|stream|3",
        "out": "path",
        "ceiling": "int or none",
        "sloppy": "int or none",
        "untyped": "float",
    }
    assert [p.name for p in found.values() if p.required] == ["steps"]
    assert found["steps"].help == "Optimizer steps, in all."
    assert found["lr"].help == found["untyped"].help == "Rates."
    assert found["fast"].help == "Hurry up."
    assert found["out"].help == "where the files go"
    assert found["name"].help == ""


def test_python_command_line_and_file_give_the_same_values(tmp_path):
    words = ["--steps", "10", "--lr=3e-4", "--fast", "--mode", "3", "--out", "a/b", "--ceiling", "none"]
    words += ["--name=x", "--untyped", "-1"]
    python = {"steps": 10, "lr": 3e-4, "fast": True, "mode": 3, "out": "a/b", "name": "x", "untyped": -1}
    (tmp_path / "p.json").write_text(json.dumps(python))
    (tmp_path / "p.toml").write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in python.items()))
    (tmp_path / "p.yaml").write_text("\n".join(f"{k}: {json.dumps(v)}" for k, v in python.items()))
    parameters = parameters_of(every_kind)
    wanted = resolve("f", parameters, python)
    assert wanted["out"] == Path("a/b") and wanted["lr"] == 3e-4 and wanted["ceiling"] is None
    assert resolve("f", parameters, parse(parameters, words)) == wanted
    for name in ("p.json", "p.toml", "p.yaml"):
        assert resolve("f", parameters, read_params(tmp_path / name)) == wanted


@given(st.integers(), st.floats(allow_nan=False), st.text(min_size=1).filter(lambda s: not s.startswith("--")))
def test_whatever_is_typed_comes_back(number, real, text):
    parameters = [Parameter("n", int), Parameter("x", float), Parameter("s", str)]
    words = ["--n", str(number), f"--x={real!r}", "--s", text]
    assert parse(parameters, words) == {"n": number, "x": real, "s": text}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "3"], r"there is no option --step; did you mean --steps\? Flow `f` has: --steps"),
        (["--stor", "x"], "did you mean --store"),
        (["--steps"], "option --steps needs a value: int"),
        (["--steps", "--fast"], "option --steps needs a value: int"),
        (["--steps", "ten"], "parameter `steps` is 'ten'; expected int"),
        (["--mode", "fast"], r"parameter `mode` is 'fast'; expected sync\|stream\|3"),
        (["--no-fast=1"], "option --no-fast takes no value"),
        (["ten"], "unexpected argument 'ten'"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_to_do(words, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(parameters_of(every_kind), words, own=["--store"], flow="f")
    assert "\n" not in str(caught.value)


def test_an_unknown_name_from_python_names_the_nearest():
    with pytest.raises(UserError, match="has no parameter `group_sise`; did you mean `group_size`"):
        resolve("f", [Parameter("group_size", int, 8)], {"group_sise": 4})


def test_a_missing_value_is_asked_for_by_its_option_and_type():
    with pytest.raises(UserError, match=r"flow `f` needs a value for --steps \(int\)"):
        resolve("f", parameters_of(every_kind), {})


def test_a_constraint_of_the_annotation_is_checked_and_told():
    def flow(lr: Annotated[float, Field(gt=0)] = 1e-4):
        pass

    with pytest.raises(UserError, match=r"parameter `lr` is '-1'; expected float \(Input should be greater"):
        resolve("flow", parameters_of(flow), parse(parameters_of(flow), ["--lr", "-1"]) or {})


def test_a_constraint_is_told_of_a_type_that_may_be_none_too():
    def flow(lr: Annotated[float, Field(gt=0)] | None = None, steps: Annotated[int, Field(ge=1)] = None):  # noqa: RUF013
        pass

    parameters = parameters_of(flow)
    for value, message in ((-1, r"is -1; expected float or none \(Input should be greater"), ("x", "float or none$")):
        with pytest.raises(UserError, match=message):
            resolve("flow", parameters, {"lr": value})
    assert resolve("flow", parameters, {}) == {"lr": None, "steps": None}


@pytest.mark.parametrize("name", ["steps", "lr", "ceiling"])
def test_true_is_no_number(name):
    with pytest.raises(UserError, match=f"parameter `{name}` is True; expected (int|float)"):
        resolve("f", parameters_of(every_kind), {"steps": 1, name: True})


def test_a_type_may_be_written_in_quotes():
    def flow(steps: "int" = 3, lr: "'float | None'" = None):  # noqa: UP037
        pass

    assert [parameter.type_name for parameter in parameters_of(flow)] == ["int", "float or none"]


def test_every_option_of_a_command_is_a_reserved_name():
    options = {option.partition(" ")[0][2:].replace("-", "_") for own in OWN_OPTIONS.values() for option in own}
    assert options <= set(RESERVED)


def no_type(x):
    pass


def a_list(x: list[int]):
    pass


def unknown_type(x: Nowhere):  # noqa: F821
    pass


def reserved(store: str):
    pass


def open_ended(**options: Any):
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_type, "parameter `x` of flow `no_type` has no type"),
        (a_list, r"parameter `x` of flow `a_list` is a `list\[int\]`; expected int, float"),
        (unknown_type, "has the type `Nowhere`, which cannot be read"),
        (reserved, "parameter `store` of flow `reserved` has a reserved name"),
        (open_ended, "cannot be set by name"),
    ],
)
def test_a_signature_that_cannot_be_options_is_refused(function, message):
    with pytest.raises(UserError, match=message):
        parameters_of(function)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.json", "{", "cannot be parsed"),
        ("p.json", "[1]", "expected names and values"),
        ("p.json", "[" * 100_000, "cannot be parsed"),
        ("p.json", '{"a": ' + "1" * 5000 + "}", "cannot be parsed"),
        ("p.yaml", "", "expected names and values, .*; got nothing"),
        ("p.yaml", "a: [", "cannot be parsed"),
        ("p.toml", "a = ", "cannot be parsed"),
        ("p.ini", "", r"expected a file that ends in \.json"),
        ("gone.json", None, "No such file"),
    ],
)
def test_a_params_file_that_cannot_be_read_is_one_line(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_params(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["p.json", "p.toml", "p.yaml"])
def test_a_params_file_may_begin_with_a_byte_order_mark(tmp_path, name):
    text = {"p.json": '{"size": 3}', "p.toml": "size = 3", "p.yaml": "size: 3"}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_params(tmp_path / name) == {"size": 3}


@given(st.text())
def test_any_docstring_can_be_read(doc):
    assert set(parameter_help(doc, ["a", "b"])) <= {"a", "b"}
