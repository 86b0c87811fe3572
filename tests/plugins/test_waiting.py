"""Tasks that are told to end do end, whatever they wait by."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from laminar_dask.waiting import end, within


def _cancelled_as_the_answer_comes(forgetful: bool) -> bool:
    """Whether a task ends that is cancelled in the very turn in which what it waits for is done."""

    async def scene() -> bool:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await (asyncio.wait_for(answer, 10) if forgetful else within(10, answer))
            await asyncio.sleep(30)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        answer.set_result(1)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.2)
        if forgetful:
            await end([task])
            assert task.cancelled()
        return bool(done)

    return asyncio.run(scene())


def test_a_cancellation_that_comes_with_the_answer_is_not_forgotten() -> None:
    assert _cancelled_as_the_answer_comes(forgetful=False)


def test_a_task_that_forgot_its_cancellation_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Python 3.11 this is the fault that held up the end of a run for ever."""
    monkeypatch.setattr("laminar_dask.waiting.ASK_AGAIN", 0.05)
    _cancelled_as_the_answer_comes(forgetful=True)


def test_within_ends_in_time_and_gives_the_result() -> None:
    async def soon() -> int:
        return 3

    assert asyncio.run(within(10, soon())) == 3
    with pytest.raises(TimeoutError):
        asyncio.run(within(0.01, asyncio.sleep(30)))


def test_a_task_that_is_ending_others_is_left_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it ends would go on beside whatever comes after it."""
    monkeypatch.setattr("laminar_dask.waiting.ASK_AGAIN", 0.1)

    async def slow_to_end() -> None:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def parent(child: asyncio.Task[None]) -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await end([child])

    async def scene() -> None:
        child = asyncio.create_task(slow_to_end())
        mine = asyncio.create_task(parent(child))
        await asyncio.sleep(0.01)
        await end([mine])
        assert child.done()
        assert mine.cancelled()

    asyncio.run(scene())


def test_what_never_ends_is_named_and_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("laminar_dask.waiting.ASK_AGAIN", 0.01)
    monkeypatch.setattr("laminar_dask.waiting.END_DEADLINE", 0.05)

    async def scene() -> None:
        until = time.monotonic() + 1

        async def stubborn() -> None:
            while time.monotonic() < until:
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue

        task = asyncio.create_task(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        try:
            raise ValueError("the run's own")
        finally:
            await end([task])
            assert not task.done()
            await task

    with pytest.raises(ValueError, match="the run's own"):
        asyncio.run(scene())
    assert "stubborn" in caplog.text
