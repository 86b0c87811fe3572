"""A process that neither works nor dies (SIGSTOP) holds nobody up but itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.live import LiveRun

OPTIONS = ["--steps", "12", "--batch-size", "32", "--eval-size", "16", "--evaluate-every", "0"]


@pytest.mark.slow  # a minute of silence each
@pytest.mark.parametrize("role", ["rollout-1", "trainer", "relay", "data"])
def test_a_run_ends_well_beside_a_stopped(role: str, tmp_path: Path) -> None:
    """NeMo-RL #3238, verl #7155: one that sleeps forever blocks no step; within a minute it is started anew."""
    run = LiveRun(tmp_path, *OPTIONS)
    pid = 0
    try:
        run.wait_for_step(2)
        pid = run.pid(role)
        run.disconnect()
        os.kill(pid, signal.SIGSTOP)
        result = run.result()
        assert (result["status"], result["steps"]) == ("finished", 12), run.said
    finally:
        if pid and Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)
        run.close()
