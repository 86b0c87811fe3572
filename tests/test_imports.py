"""``import laminar`` is cheap: nobody pays for a model library before a model is wanted."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"torch", "transformers", "vllm", "matplotlib"}


def imported(module: str) -> tuple[set[str], float]:
    """Top-level modules that importing ``module`` loads in a fresh interpreter, and its seconds."""
    code = (
        "import json, sys, time; began = time.perf_counter(); "
        f"import {module}; seconds = time.perf_counter() - began; "
        "print(json.dumps([sorted({name.partition('.')[0] for name in sys.modules}), seconds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    names, seconds = json.loads(done.stdout)
    return set(names), float(seconds)


def test_importing_laminar_loads_no_model_library() -> None:
    names, _ = imported("laminar")
    assert names & HEAVY == set()


def test_importing_laminar_is_fast() -> None:
    assert min(imported("laminar")[1] for _ in range(3)) < 1.0


def test_watching_a_run_loads_no_model_library() -> None:
    names, _ = imported("laminar.watch.progress, laminar.watch.report, laminar.watch.metrics")
    assert names & HEAVY == set()


def test_the_command_line_loads_no_model_library() -> None:
    names, _ = imported("laminar.cli")
    assert names & HEAVY == set()
