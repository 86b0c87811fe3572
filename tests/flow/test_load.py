"""Flow files: what cannot be loaded is one line, and what can travels to workers by value."""

from __future__ import annotations

import pytest

from laminar.errors import UserError
from laminar.flow.load import load_flow

ONE = "import laminar as lm\n\n@lm.flow\ndef demo(): pass\n"


@pytest.mark.parametrize(
    ("source", "flow", "message"),
    [
        ("def x(:\n", "", r"flow.py:1: syntax error: "),
        ("import nowhere_to_be_found\n", "", "flow.py:1 raised ModuleNotFoundError: No module named"),
        ("x = 1\ny = x / 0\n", "", "flow.py:2 raised ZeroDivisionError: division by zero"),
        ("x = 1\n", "", "has no flow; write @lm.flow above a function"),
        (ONE + ONE.replace("demo", "other"), "", "has 2 flows; name one: .*flow.py:demo, .*flow.py:other"),
        (ONE, ":dema", "has no flow 'dema'; did you mean 'demo'"),
        ("import sys\nsys.exit('bye')\n", "", "flow.py:2 raised SystemExit: bye"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n", "", "flow.py:2 raised SystemExit: 2"),
        ("import laminar as lm\n@lm.flow\nasync def demo(): pass\n", "", "flow `demo` is an async function"),
        ("import laminar as lm\n@lm.flow\ndef demo(): yield 1\n", "", "flow `demo` is a generator function"),
        ("import laminar as lm\n@lm.flow\nclass demo: pass\n", "", "flow `demo` is a class; write it as a plain def"),
    ],
)
def test_a_flow_file_that_cannot_be_used_is_one_line(tmp_path, source, flow, message):
    (tmp_path / "flow.py").write_text(source)
    with pytest.raises(UserError, match=message) as caught:
        load_flow(f"{tmp_path / 'flow.py'}{flow}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        load_flow(str(tmp_path / "gone.py"))


def test_options_before_the_file_are_told_where_they_belong():
    with pytest.raises(UserError, match=r"expected a flow's FILE first and its options after it, as flow.py --steps"):
        load_flow("--steps")


def test_a_path_may_have_a_colon(tmp_path):
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "flow.py").write_text(ONE)
    assert load_flow(f"{tmp_path}/a:b/flow.py").name == load_flow(f"{tmp_path}/a:b/flow.py:demo").name == "demo"


def test_a_flow_is_found_by_name_and_alone_without_one(tmp_path):
    (tmp_path / "flow.py").write_text(ONE + ONE.replace("demo", "other"))
    assert load_flow(f"{tmp_path}/flow.py:other").name == "other"
    (tmp_path / "flow.py").write_text(ONE)
    assert load_flow(f"{tmp_path}/flow.py").name == "demo"
