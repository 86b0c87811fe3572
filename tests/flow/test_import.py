"""``import laminar`` is cheap, and every public name is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import laminar as lm

HEAVY = {"torch", "transformers", "vllm", "matplotlib", "distributed", "dask", "pydantic", "pyarrow", "duckdb"}


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_laminar_loads_nothing_heavy():
    program = "import sys, laminar; print(*{name.split('.')[0] for name in sys.modules})"
    assert not HEAVY & set(run(program).split())


def test_writing_a_flow_down_loads_nothing_heavy():
    program = "import sys, laminar as lm; lm.flow, lm.task; print(*{n.split('.')[0] for n in sys.modules})"
    assert not HEAVY & set(run(program).split())


@pytest.mark.parametrize("module", ["laminar.cli", "laminar.watch.progress, laminar.watch.report, laminar.specs"])
def test_the_command_line_and_watching_load_no_model_library(module):
    loaded = set(run(f"import sys, {module}; print(*{{n.split('.')[0] for n in sys.modules}})").split())
    assert not {"torch", "transformers", "vllm", "matplotlib"} & loaded


def test_a_function_keeps_its_name_when_the_module_of_that_name_is_imported_first():
    program = "import laminar.flow.trace, laminar.post_train, laminar as lm; print(lm.flow, lm.post_train)"
    assert run(program).count("<function ") == 2


@pytest.mark.parametrize("name", lm.__all__)
def test_every_public_name_can_be_had(name):
    assert getattr(lm, name) is not None
    assert name in dir(lm)


def test_a_name_that_does_not_exist_is_an_error_that_lists_those_that_do():
    with pytest.raises(AttributeError, match="has no attribute 'grpo'; it has: GRPO"):
        lm.grpo  # noqa: B018
