"""The store goes away, or is full, while a run goes on: it pauses and says so, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import LiveRun, wait_for

STEPS, BATCH = 12, 32
OPTIONS = ["--steps", str(STEPS), "--batch-size", str(BATCH), "--eval-size", "16", "--evaluate-every", "0"]
STATES = "select trajectory_id, state, trained_step from experience"


def ids(run: LiveRun) -> set[str]:
    return {row["trajectory_id"] for row in run.query(STATES)}


def trained_every_step_once(run: LiveRun, result: dict[str, object], before: set[str]) -> None:
    assert (result["status"], result["steps"]) == ("finished", STEPS), run.said
    rows = run.query(STATES)
    assert len({row["trajectory_id"] for row in rows}) == len(rows)
    assert before <= {row["trajectory_id"] for row in rows}
    for step in range(1, STEPS + 1):
        assert sum(row["trained_step"] == step for row in rows) == BATCH


def lines_about_the_store(run: LiveRun) -> list[str]:
    return [line for line in run.lines if "the store does not take them" in line]


def bring_back(run: LiveRun, away: Path) -> None:
    """The store is there again, with all that was in it. What was begun in its place meanwhile is not."""
    place = Path(run.url)
    if place.exists():
        place.rename(away.with_name("begun-meanwhile"))
    away.rename(place)


def test_a_run_pauses_while_its_store_is_away_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, *OPTIONS)
    try:
        run.wait_for_step(2)
        before = ids(run)
        Path(run.url).rename(tmp_path / "away")
        wait_for("line that says that the store is gone", lambda: lines_about_the_store(run))
        bring_back(run, tmp_path / "away")
        result = run.result()
    finally:
        run.close()
    assert len(lines_about_the_store(run)) == 1, run.said
    trained_every_step_once(run, result, before)


@pytest.mark.slow
def test_a_run_whose_store_stays_away_ends_with_one_line_and_a_resume_loses_nothing(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, *OPTIONS)
    try:
        run.wait_for_step(2)
        before = ids(run)
        Path(run.url).rename(tmp_path / "away")
        code = run.end(290)
    finally:
        run.close()
    assert code != 0 and "Traceback" not in run.said, run.said
    assert "the data worker did not take" in run.lines[-1] and "experience has vanished" in run.lines[-1], run.said
    assert sum("has vanished" in line for line in run.lines) <= 4, run.said
    bring_back(run, tmp_path / "away")
    again = LiveRun(tmp_path, run_id=run.run_id, resume=True)
    try:
        trained_every_step_once(again, again.result(), before)
    finally:
        again.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "laminar-test", str(folder)]
    if (done := subprocess.run(mount, capture_output=True, text=True, timeout=10)).returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)


@pytest.mark.slow
def test_a_run_pauses_while_its_disk_is_full_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    run = LiveRun(small_disk, *OPTIONS)
    ballast = small_disk / "ballast"
    try:
        run.wait_for_step(2)
        before = ids(run)
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 16))
        wait_for("line that says that the disk is full", lambda: lines_about_the_store(run))
        assert "No space left on device" in lines_about_the_store(run)[0]
        ballast.unlink()
        trained_every_step_once(run, run.result(), before)
    finally:
        ballast.unlink(missing_ok=True)
        run.close()
