"""A run of the quickstart in a process of its own, watched and hurt from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client

from laminar.experience.reader import Experience
from laminar.watch.metrics import read_metrics

__all__ = ["ROOT", "LiveRun", "laminar_flow", "wait_for"]

ROOT = Path(__file__).parents[1]
FLOW = ROOT / "flows" / "quickstart.py"
T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], *, deadline: float = 120.0) -> T:
    """Look again and again until there is something; fail with what was waited for."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        threading.Event().wait(0.1)
    raise AssertionError(f"no {what} within {deadline:.0f} s")


def laminar_flow(*arguments: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    command = [sys.executable, "-m", "laminar.cli.app", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)


class LiveRun:
    """``laminar-flow run flows/quickstart.py --json …`` in the background, or ``resume``."""

    def __init__(
        self, store: Path, *options: str, flow: Path = FLOW, run_id: str | None = None, resume: bool = False
    ) -> None:
        run_id = run_id or f"live-{uuid.uuid4().hex[:8]}"  # tests may run beside each other on one host
        self.run_id = run_id
        self.url = str(store / "quickstart" / run_id)
        what = ["resume", run_id] if resume else ["run", str(flow), "--run-id", run_id]
        command = [sys.executable, "-m", "laminar.cli.app", *what, "--json", "--store", str(store)]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._out: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stderr, self.lines), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stdout, self._out), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._client: Client | None = None

    @staticmethod
    def _read(pipe: Any, lines: list[str]) -> None:
        lines.extend(iter(pipe.readline, ""))

    @property
    def said(self) -> str:
        """What the run wrote for people so far."""
        return "".join(self.lines)

    @property
    def client(self) -> Client:
        """A client of the run's scheduler."""
        if self._client is None:
            address = wait_for("scheduler address in run.json", self._scheduler)
            self._client = Client(address, set_as_default=False, timeout=30)
        return self._client

    def _scheduler(self) -> str | None:
        record = Path(self.url) / "run.json"
        return json.loads(record.read_text()).get("scheduler") if record.exists() else None

    def pid(self, role: str) -> int:
        """Process id of the worker of that name."""

        def look() -> int | None:
            address = next((address for address, name in self.workers().items() if name == role), None)
            return None if address is None else self.client.run(os.getpid, workers=[address])[address]

        return wait_for(f"worker `{role}`", look)

    def kill(self, *roles: str) -> None:
        """End workers the hard way, all at once, and be gone before the run is."""
        for pid in [self.pid(role) for role in roles]:
            os.kill(pid, signal.SIGKILL)
        self.disconnect()

    def close_workers(self, *roles: str) -> None:
        """Have workers close themselves, as Dask's do after an error in a heartbeat, and their nannies with them."""

        def close(dask_worker: Any) -> None:
            dask_worker.loop.add_callback(dask_worker.close, reason="worker-heartbeat-error")

        self.client.run(close, workers=[address for address, name in self.workers().items() if name in roles])
        self.disconnect()

    def workers(self) -> dict[str, str]:
        """Addresses and names of the workers."""
        return {
            address: worker["id"] for address, worker in self.client.scheduler_info(n_workers=-1)["workers"].items()
        }

    def disconnect(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close(timeout=5)
            self._client = None

    def steps(self) -> list[int]:
        """Steps whose metrics are on disk."""
        return [int(n) for n in read_metrics(self.url, "steps").to_pydict().get("step", [])]

    def wait_for_step(self, step: int, *, deadline: float = 180.0) -> None:
        """Until a step is done (and its metrics written)."""

        def look() -> bool:
            assert self.process.poll() is None, f"the run ended early:\n{self.said}"
            return max(self.steps(), default=0) >= step

        wait_for(f"step {step}", look, deadline=deadline)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """SQL over the run's experience, from its files."""
        return list(Experience(self.url).query(sql).to_pylist())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def result(self, *, deadline: float = 300.0) -> dict[str, Any]:
        """Wait for the end: the JSON that it printed."""
        self.end(deadline)
        out = "".join(self._out)
        assert out.strip(), f"nothing on stdout; exit {self.process.returncode}:\n{self.said}"
        found: dict[str, Any] = json.loads(out)
        return found

    def end(self, deadline: float = 300.0) -> int:
        """Wait for the end: its exit code."""
        code = self.process.wait(deadline)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        """Leave nothing running."""
        self.disconnect()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
