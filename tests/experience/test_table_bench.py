"""The table's own measurements: they run, and the owner's memory stays flat however much goes through it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.bench.table import bench_table
from laminar.errors import UserError

MEMORY = """
import json, sys
from pathlib import Path
from laminar.bench.table import memory_while
print(json.dumps(memory_while(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
"""


@pytest.mark.parametrize(
    ("gigabytes", "budget"), [(0.8, 64 << 20), pytest.param(20.0, 1 << 30, marks=[pytest.mark.slow])]
)
@pytest.mark.timeout(1800)
def test_the_owners_memory_is_flat_while_payload_goes_through_its_budget(
    tmp_path: Path, gigabytes: float, budget: int
) -> None:
    """verl #2950, #429: buffers grew until the host was out of memory."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(gigabytes), str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=True)
    numbers = json.loads(done.stdout)
    print(numbers)
    assert numbers["memory_payload_gigabytes"] >= gigabytes
    assert numbers["memory_growth"] < 1.1, numbers


def test_the_bench_measures_every_figure_that_is_promised() -> None:
    numbers = bench_table(megabytes=4, payload_gigabytes=0.2, budget_bytes=16 << 20, query_rows=20_000, repeats=1)
    for figure in ("append_ratio", "sample_ratio", "memory_growth", "query_ratio"):
        assert numbers[figure] > 0
    assert numbers["append_slowdown"] < 1


def test_parts_of_the_bench_are_measured_by_themselves_and_an_unknown_one_is_named() -> None:
    assert "memory_growth" not in bench_table(only=["sample"], repeats=1)
    with pytest.raises(UserError, match="no part `samples`; there are: append, sample, memory, queries"):
        bench_table(only=["samples"])
