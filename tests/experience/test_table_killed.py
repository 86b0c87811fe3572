"""A process that owns the table is killed with SIGKILL: what it acknowledged is there, once."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from laminar.experience.reader import Experience
from laminar.experience.table import ExperienceTable
from tests.experience.writers import writer

DEADLINE = 30.0
"""Seconds for a writer to say something."""


def killed(url: str, *, first: int, after: int, moment: float) -> list[tuple[str, list[str]]]:
    """All that a writer acknowledged until it was killed, ``moment`` seconds after so many messages."""
    said = []
    with writer(url, first=first, groups=100) as (process, acknowledged):
        for _ in range(after):
            assert acknowledged.poll(DEADLINE), "the writer is silent"
            said.append(acknowledged.recv())
        acknowledged.poll(moment)
        process.kill()
        process.join(DEADLINE)
        assert process.exitcode == -signal.SIGKILL
        try:
            while acknowledged.poll(0):
                said.append(acknowledged.recv())
        except EOFError:
            return said
    return said


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_loses_nothing_acknowledged_and_has_nothing_twice(
    tmp_path: Path, kills: int
) -> None:
    draw = random.Random(0)
    url = str(tmp_path)
    said = []
    for number in range(kills):
        said += killed(url, first=number * 100, after=draw.randrange(1, 9), moment=draw.uniform(0, 0.02))
    appended = {name for what, names in said if what == "appended" for name in names}
    trained = [name for what, names in said if what == "trained" for name in names]
    assert len(trained) == len(set(trained)) > 0
    rows = Experience(url).query("select trajectory_id, state, len(response_ids) as n from experience").to_pylist()
    assert max(Counter(row["trajectory_id"] for row in rows).values()) == 1
    assert appended <= {row["trajectory_id"] for row in rows}
    assert set(trained) <= {row["trajectory_id"] for row in rows if row["state"] == "trained"}
    assert {row["n"] for row in rows} == {50}
    table = ExperienceTable(url)
    assert table.counts()["rows"] == len(rows)
    assert table.trained_rows() == sum(row["state"] == "trained" for row in rows)
    table.close()
