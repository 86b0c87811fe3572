"""The gate of a replica: who waits for what, and for how long."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

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


def test_waiting_behind_what_runs_is_no_fault_however_long_it_takes(source: Source) -> None:
    """A trajectory of hours holds back one that needs another version, and that one must not end the run."""

    async def scene() -> tuple[Version, Version]:
        serving = _serving(source)
        source.publish(1)
        never = asyncio.Event()
        try:
            first = await serving.enter(Want(), never, never)
            source.publish(2)
            second = asyncio.create_task(serving.enter(Want(exactly=2), never, never))
            await asyncio.sleep(3 * module.WEIGHTS_DEADLINE)
            assert not second.done()
            serving.leave()
            return first, await asyncio.wait_for(second, 10)
        finally:
            await serving.close()

    assert asyncio.run(scene()) == (1, 2)


def test_a_load_that_takes_longer_than_the_deadline_is_no_fault(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> tuple[Version, Version]:
        serving = _serving(source)
        source.publish(1)
        never = asyncio.Event()
        try:
            first = await serving.enter(Want(), never, never)
            source.publish(2)
            second = asyncio.create_task(serving.enter(Want(exactly=2), never, never))
            await asyncio.sleep(0.9 * module.WEIGHTS_DEADLINE)
            load = serving.engine.load
            monkeypatch.setattr(
                serving.engine, "load", lambda *given: (time.sleep(3 * module.WEIGHTS_DEADLINE), load(*given))
            )
            serving.leave()
            return first, await asyncio.wait_for(second, 10)
        finally:
            await serving.close()

    assert asyncio.run(scene()) == (1, 2)


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
