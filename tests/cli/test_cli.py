"""The command line: exit codes, errors of one line, JSON and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from laminar.cli import bench
from laminar.cli.app import run_app
from laminar.cli.output import only_json

FLOW = '''
from typing import Literal
import laminar as lm

@lm.task
def numbers(size: int) -> list:
    return list(range(size))

@lm.task
def total(values: list) -> int:
    return sum(values)

@lm.flow
def demo(size: int, mode: Literal["sum", "max"] = "sum", fast: bool = False):
    """Add numbers up.

    Parameters
    ----------
    size
        How many.
    """
    return total(numbers(size))
'''


@pytest.fixture
def flow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text(FLOW)
    return "flow.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "gone.py"], "there is no file 'gone.py'"),
        (["run"], "which flow? Give a FILE"),
        (["run", "flow.py"], "flow `demo` needs a value for --size (int)"),
        (["run", "flow.py", "--siz", "3"], "there is no option --siz; did you mean --size?"),
        (["run", "flow.py", "--size", "x"], "parameter `size` is 'x'; expected int"),
        (["check", "flow.py", "--size=3", "--mode", "mean"], "parameter `mode` is 'mean'; expected sum|max"),
        (["check", "flow.py", "--params", "gone.json"], "--params gone.json: No such file"),
        (["run", "flow.py", "--size", "3", "--store", "/proc/x"], "the run store /proc/x cannot be written"),
        (["run", "flow.py", "--size", "3", "--run-id", "a/b"], "run id 'a/b': expected"),
        (["graph", "flow.py", "--size", "3", "--output", "x.png"], "expected a file that ends in .svg"),
        (["query", "latest", "select 1"], "there is no run in the store"),
        (["check", "--size", "3", "flow.py"], "expected a flow's FILE first and its options after it"),
        (["resume", "nosuch://a/b"], "nosuch://a/b/run.json cannot be read: Protocol not known: nosuch"),
        (["ruin"], "No such command 'ruin'"),
        (["ls", "--stor", "x"], "No such option"),
        (["bench", "nothing"], "there is no bench `nothing`"),
    ],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_a_mistake_is_one_line_and_exit_2(flow, capfd, arguments, message, json_too):
    assert run_app([*arguments, *(["--json"] if json_too else [])]) == 2
    out, err = capfd.readouterr()
    assert message in err and err.count("\n") == 1
    if json_too:
        answer = json.loads(out)
        assert answer["status"] == "failed" and message in answer["error"] and answer["run_id"] is None
    else:
        assert out == ""


def test_help_shows_the_options_of_the_flow(flow, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run_app(["run", flow, "--help"]) == 0
    out = capsys.readouterr().out
    for part in ("--size", "required", "How many.", "sum|max", "--fast / --no-fast", "--store URL", "Add numbers up."):
        assert part in out


@pytest.mark.parametrize("command", ["run", "check", "graph"])
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_without_a_flow_says_where_to_find_its_options(capsys, command, word):
    assert run_app([command, word]) == 0
    out = capsys.readouterr().out
    assert f"laminar-flow {command} FILE[:FLOW]" in out and "--params FILE" in out
    assert "With a FILE, --help shows its flow's parameters." in out


def test_check_prints_values_and_processes_and_starts_nothing(flow, capfd, tmp_path):
    assert run_app(["check", flow, "--size", "3", "--fast", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["parameters"] == {"size": 3, "mode": "sum", "fast": True}
    assert set(answer["roles"]) == {"scheduler", "data"}
    assert not (tmp_path / "runs").exists()
    assert run_app(["check", flow, "--size", "3"]) == 0
    assert "data" in capfd.readouterr().out


def test_a_params_file_gives_what_options_do_not(flow, capfd, tmp_path):
    (tmp_path / "p.yaml").write_text("size: 5\nmode: max\n")
    assert run_app(["check", flow, "--params", "p.yaml", "--mode", "sum", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["parameters"] == {"size": 5, "mode": "sum", "fast": False}


def test_graph_is_text_or_a_drawing(flow, capfd, tmp_path):
    assert run_app(["graph", flow, "--size", "3"]) == 0
    assert capfd.readouterr().out == "demo\n└── total (task)\n    └── numbers (task)\n"
    assert run_app(["graph", flow, "--size", "3", "--output", "g.svg"]) == 0
    assert ET.parse(tmp_path / "g.svg").getroot().tag.endswith("svg")


def test_with_json_nothing_else_comes_to_stdout_not_even_from_other_processes(capfd):
    with only_json() as stdout:
        print("from here")
        subprocess.run([sys.executable, "-c", "print('from there')"], check=True, timeout=30)
        print("{}", file=stdout)
    print("after")
    out, err = capfd.readouterr()
    assert out == "{}\nafter\n"
    assert "from here" in err and "from there" in err


def test_an_unforeseen_error_is_one_line_and_its_traceback_is_kept(capfd, monkeypatch):
    monkeypatch.setitem(bench.BENCHES, "broken", lambda: {"x": 1 / 0})
    assert run_app(["bench", "broken"]) == 1
    err = capfd.readouterr().err
    assert "ZeroDivisionError: division by zero; its traceback is in " in err and err.count("\n") == 1


@pytest.mark.parametrize("json_too", [False, True])
def test_ctrl_c_before_anything_has_started_is_one_line_and_exit_130(flow, capfd, tmp_path, json_too):
    (tmp_path / "flow.py").write_text("raise KeyboardInterrupt\n")
    assert run_app(["run", flow, *(["--json"] if json_too else [])]) == 130
    out, err = capfd.readouterr()
    assert err == "laminar-flow: ended by Ctrl-C\n"
    assert not json_too or json.loads(out) == {"status": "stopped", "error": "ended by Ctrl-C", "run_id": None}


def test_ctrl_c_while_the_command_is_loaded_is_one_line_too():
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv = ['laminar-flow', 'ls', '--json']\n"
        "from laminar.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr == "laminar-flow: ended by Ctrl-C\n"
    assert json.loads(done.stdout)["status"] == "stopped"


def test_a_flow_file_that_exits_is_one_json_object_too(flow, capfd, tmp_path):
    (tmp_path / "flow.py").write_text("import sys\nsys.exit(0)\n")
    assert run_app(["check", flow, "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"] == "flow.py:2 raised SystemExit: 0"


def test_an_unforeseen_error_is_told_where_its_traceback_cannot_be_kept(capfd, monkeypatch):
    monkeypatch.setitem(bench.BENCHES, "broken", lambda: {"x": 1 / 0})
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.gettempdir", lambda: "/proc/nowhere")
        assert run_app(["bench", "broken"]) == 1
    assert "ZeroDivisionError: division by zero; its traceback could not be kept" in capfd.readouterr().err


def test_a_bench_gives_its_numbers(capfd, monkeypatch):
    monkeypatch.setitem(bench.BENCHES, "quick", lambda: {"ratio": 0.95})
    assert run_app(["bench", "quick", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"status": "ok", "bench": "quick", "ratio": 0.95}
    assert run_app(["bench"]) == 0
    assert "quick" in (out := capfd.readouterr().out)
    assert "Handing a version over, taking it" in out


def test_version_and_bare_command(capfd):
    assert run_app(["--version"]) == 0
    assert capfd.readouterr().out.startswith("laminar-flow ")
    assert run_app([]) == 0
    assert "Usage" in capfd.readouterr().out
