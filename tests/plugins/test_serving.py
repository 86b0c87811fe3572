"""The gate of a replica: who waits for what, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from laminar.errors import RunFailed
from laminar.rollout.emulation import EmulatedVersions, Emulation
from laminar.rollout.engine import Engine
from laminar.rollout.engines import create_engine
from laminar.rollout.gate import Want
from laminar.trajectory import Version
from laminar_dask import serving as module
from laminar_dask.serving import Serving


class Source(EmulatedVersions):
    """Emulated versions in a folder of the test's."""

    def load(self, engine: Engine, version: Version) -> None:
        engine.load(version, {})

    def close(self) -> None: ...


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(module, "WEIGHTS_DEADLINE", 0.2)
    return Source(tmp_path)


def _serving(source: Source) -> Serving:
    engine = create_engine("emulated", "", emulation=Emulation(time_scale=1000), kv_tokens=100_000, max_running=8)
    engine.start()
    return Serving(engine, source)


def _second_waits_for_the_first(source: Source, seconds: float, on_load: Callable[[], None]) -> tuple[Version, Version]:
    """The versions given to a trajectory and to one that needs the next version and waits behind it so long."""

    async def scene() -> tuple[Version, Version]:
        serving = _serving(source)
        source.publish(1)
        never = asyncio.Event()
        try:
            first = await serving.enter(Want(), never, never)
            source.publish(2)
            second = asyncio.create_task(serving.enter(Want(exactly=2), never, never))
            await asyncio.sleep(seconds)
            assert not second.done()
            load = serving.engine.load
            with patch.object(serving.engine, "load", lambda *given: (on_load(), load(*given))):
                serving.leave()
                return first, await asyncio.wait_for(second, 10)
        finally:
            await serving.close()

    return asyncio.run(scene())


def test_waiting_behind_what_runs_is_no_fault_however_long_it_takes(source: Source) -> None:
    """A trajectory of hours holds back one that needs another version, and that one must not end the run."""
    assert _second_waits_for_the_first(source, 3 * module.WEIGHTS_DEADLINE, lambda: None) == (1, 2)


def test_a_load_that_takes_longer_than_the_deadline_is_no_fault(source: Source) -> None:
    seconds = 0.9 * module.WEIGHTS_DEADLINE
    slow = partial(time.sleep, 3 * module.WEIGHTS_DEADLINE)
    assert _second_waits_for_the_first(source, seconds, slow) == (1, 2)


def test_weights_that_never_come_end_it_with_what_was_waited_for(source: Source) -> None:
    async def scene() -> None:
        serving = _serving(source)
        never = asyncio.Event()
        try:
            await serving.enter(Want(at_least=1), never, never)
        finally:
            await serving.close()

    with pytest.raises(RunFailed, match=r"no weights for Want\(at_least=1.*the relay holds \[\]"):
        asyncio.run(scene())
