"""A replica's messages to the data worker: few of them, and none lost where that worker is another one by now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.errors import LaminarError
from laminar.experience.store import StoreError
from laminar_dask import outbox as module
from laminar_dask.outbox import Batcher, Outbox


class Data:
    """A cluster whose data worker answers by a function; who has the role may change."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.address = "tcp://first"
        self.asked: list[tuple[str, list[Any]]] = []
        self.scheduler = SimpleNamespace(laminar_workers=self._workers)

    async def _workers(self, role: str) -> list[str]:
        return [self.address]

    def rpc(self, address: str) -> Any:
        async def laminar_resume(keys: list[Any]) -> Any:
            self.asked.append((address, keys))
            answer = self.answer(address)
            if isinstance(answer, Exception):
                raise answer
            return None if answer is None else [answer] * len(keys)

        return SimpleNamespace(laminar_resume=laminar_resume)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(module.asyncio, "sleep", lambda seconds: sleep(0))


def resume(data: Data, *keys: str) -> list[Any]:
    async def ask() -> list[Any]:
        outbox = Outbox(data)  # type: ignore[arg-type]
        return await asyncio.gather(*(outbox.resume((key, 1)) for key in keys), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_what_is_asked_together_goes_in_one_message_and_each_gets_its_own_answer() -> None:
    sent: list[list[int]] = []

    async def send(items: list[int]) -> list[int]:
        sent.append(items)
        return [10 * item for item in items]

    async def ask() -> list[int]:
        batcher = Batcher(send)
        return [*await asyncio.gather(*(batcher(item) for item in range(5))), await batcher(7)]

    assert asyncio.run(ask()) == [0, 10, 20, 30, 40, 70]
    assert sent == [[0, 1, 2, 3, 4], [7]]


def test_an_error_reaches_all_that_were_in_the_message_and_none_after_it() -> None:
    async def send(items: list[str]) -> list[str]:
        if "bad" in items:
            raise LaminarError("not taken")
        return items

    async def ask() -> list[Any]:
        batcher = Batcher(send)
        first = await asyncio.gather(batcher("good"), batcher("bad"), return_exceptions=True)
        return [*map(str, first), await batcher("good")]

    assert asyncio.run(ask()) == ["not taken", "not taken", "good"]


@pytest.mark.parametrize("lost", [None, OSError("connection refused"), TimeoutError(), StoreError("the store is full")])
def test_a_message_goes_to_whoever_has_the_role_by_then(lost: Any) -> None:
    def answer(address: str) -> Any:
        data.address = "tcp://second"
        return lost if address == "tcp://first" else "prefix"

    data = Data(answer)
    assert resume(data, "g0-0", "g0-1") == ["prefix", "prefix"]
    assert [address for address, _ in data.asked] == ["tcp://first", "tcp://second"]
    assert data.asked[0][1] == data.asked[1][1] == [["g0-0", 1], ["g0-1", 1]]


def test_a_data_worker_that_does_not_come_back_ends_the_wait_with_what_was_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    [error] = resume(Data(lambda address: OSError("connection refused")), "g0-0")
    assert isinstance(error, LaminarError)
    assert str(error) == "the data worker did not take `resume` for 180 s: connection refused"


def test_an_error_of_the_table_itself_is_not_asked_again() -> None:
    data = Data(lambda address: ValueError("token versions do not fit"))
    [error] = resume(data, "g0-0")
    assert isinstance(error, ValueError)
    assert len(data.asked) == 1
