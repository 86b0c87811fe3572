"""Hand-overs on a real scheduler with emulated replicas: moves, deaths in the middle of them, drain, triggers."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Future, Scheduler, Worker

from laminar.errors import LaminarError
from laminar.experience.reader import Experience
from laminar.rollout.emulation import EMULATED, EmulatedVersions, Emulation
from laminar.rollout.engines.emulated import EmulatedEngine
from laminar.trajectory import Prompt, Sampling, TrajectoryRequest
from laminar.weights.layout import Layout
from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher
from laminar.weights.segment import remove_segments, segment_root
from laminar_dask.environment import FullMarksPlugin
from laminar_dask.handover import Handover
from laminar_dask.repack import RepackPlugin, RepackSettings
from laminar_dask.replica import ReplicaPlugin, ReplicaSettings, trajectory
from laminar_dask.roles import RolesPlugin
from laminar_dask.table import TablePlugin

MODEL = Path(__file__).parents[2] / "flows" / "models" / "running-sums"
DEADLINE = 40.0
CAP = 16384
SLOTS = 128


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE:.0f} s"
        await asyncio.sleep(0.005)


@dataclass
class Fleet:
    """A scheduler, a data worker and emulated replicas, all in this process but each with its own server."""

    scheduler: Scheduler
    client: Client
    url: str
    run: str
    emulation: Emulation
    replicas: list[Worker] = field(default_factory=list)
    futures: list[Future] = field(default_factory=list)

    @property
    def repack(self) -> RepackPlugin:
        return self.scheduler.plugins["laminar-repack"]

    def plugin(self, number: int) -> ReplicaPlugin:
        return self.replicas[number].plugins["laminar-replica"]

    def handover(self, number: int) -> Handover:
        return self.plugin(number).handover

    def generating(self, number: int) -> int:
        return sum(attempt.phase == "generating" for attempt in self.plugin(number).attempts.values())

    def length(self, request: str) -> int:
        return EmulatedEngine(emulation=self.emulation).workload.length(request, CAP)

    async def add_replica(self) -> Worker:
        worker = Worker(
            self.scheduler.address,
            host="127.0.0.1",
            dashboard=False,
            nthreads=SLOTS,
            resources={"rollout": SLOTS},
            name=f"rollout-{len(self.replicas)}",
        )
        self.replicas.append(await worker)
        await self.plugin(-1).ready  # the library cannot load two models at once in one process
        return worker

    async def start(
        self, number: int, count: int, *, name: str = "g", sampling: Sampling | None = None
    ) -> list[Future]:
        """Give a replica one group; returns once all of it generates."""
        requests = [
            TrajectoryRequest(
                run=self.run,
                group=f"{name}{number}",
                sample=sample,
                group_size=count,
                prompt=Prompt(id=name, text=""),
                prompt_ids=(5, 3, 8, 2, 9) if sampling else (300,),
                sampling=sampling or Sampling(max_new_tokens=CAP),
                environment=EMULATED,
            )
            for sample in range(count)
        ]
        futures = self.client.map(
            trajectory,
            requests,
            key=[request.key for request in requests],
            workers=[self.replicas[number].address],
            allow_other_workers=True,
            resources={"rollout": 1},
            pure=False,
        )
        self.futures += futures
        before = self.generating(number)
        await until(lambda: self.generating(number) >= before + count, f"{count} trajectories on replica {number}")
        return list(futures)

    async def results(self) -> dict[str, dict[str, Any]]:
        """All of them, whole, once in the table, and each as long as it was always going to be."""
        results = await asyncio.wait_for(self.client.gather(self.futures), DEADLINE)
        found = {result["id"]: result for result in results}
        assert len(found) == len(self.futures)
        rows = Experience(self.url).query("select trajectory_id, response_ids, migrations from experience").to_pylist()
        assert sorted(row["trajectory_id"] for row in rows) == sorted(found)
        for row in rows:
            expected = self.length(row["trajectory_id"])
            assert sum(row["response_ids"]) == found[row["trajectory_id"]]["tokens"] == expected
            assert row["migrations"] == found[row["trajectory_id"]]["migrations"]
        return found


def publish(run: str, model: str) -> SegmentOwner | None:
    """Version 1 on this host, as a trainer and a relay leave it."""
    root = segment_root(run)
    if model == EMULATED:
        EmulatedVersions(root).publish(1)
        return None
    from transformers import AutoModelForCausalLM

    parameters = AutoModelForCausalLM.from_pretrained(model, dtype="float32").named_parameters()
    tensors = {name: parameter.detach() for name, parameter in parameters}
    owner = SegmentOwner(root)
    owner.prepare(Layout.of(tensors))
    publisher = Publisher(root)
    publisher.publish(1, tensors)
    publisher.close()
    owner.promote(1)
    return owner


@asynccontextmanager
async def fleet(
    folder: Path, *, replicas: int = 3, time_scale: float = 40.0, model: str = EMULATED, **options: Any
) -> AsyncIterator[Fleet]:
    run = f"test-{uuid.uuid4().hex[:8]}"
    emulation = Emulation(time_scale=time_scale)
    settings = ReplicaSettings(
        run=run,
        model=model,
        engine=EMULATED if model == EMULATED else "transformers",
        kv_tokens=2_500_000 if model == EMULATED else 8192,
        slots=SLOTS,
        threads=1,
        seed=0,
        trajectory_deadline=300.0,
        emulation=emulation,
    )
    rules = RepackSettings(run=run, cap=CAP, slots=SLOTS, time_scale=time_scale, **{"automatic": False} | options)
    owner = publish(run, model)
    try:
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            data = Worker(scheduler.address, host="127.0.0.1", dashboard=False, nthreads=4, resources={"data": 1})
            async with data, Client(scheduler.address, asynchronous=True) as client:
                made = Fleet(scheduler, client, str(folder), run, emulation)
                plugins: list[Any] = [RolesPlugin(), RepackPlugin(rules), TablePlugin(str(folder))]
                for plugin in [*plugins, ReplicaPlugin(settings), FullMarksPlugin(EMULATED)]:
                    await client.register_plugin(plugin)
                for _ in range(replicas):
                    await made.add_replica()
                try:
                    yield made
                finally:
                    await client.cancel(made.futures, force=True)
                    for worker in made.replicas:
                        await worker.close()
    finally:
        if owner is not None:
            owner.close()
        remove_segments(segment_root(run))


def check(scenario: Callable[[Fleet], Awaitable[None]], folder: Path, **options: Any) -> None:
    async def go() -> None:
        async with fleet(folder, **options) as made:
            await scenario(made)

    asyncio.run(go())


def test_a_running_trajectory_moves_with_its_key_and_future_and_each_token_counts_once(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        futures = await made.start(0, 24)
        keys = [future.key for future in futures]
        before = {key: made.scheduler.tasks[key].worker_restrictions for key in keys}
        answer = await made.client.scheduler.laminar_repack_move(source="rollout-0", target="rollout-1")
        assert answer["moved"] == 24
        await until(lambda: made.generating(1) == 24, "24 trajectories on the target")
        assert [future.key for future in futures] == keys and all(f.status == "pending" for f in futures)
        assert made.generating(0) == 0
        for key in keys:
            assert made.scheduler.tasks[key].worker_restrictions == before[key]  # the user's own is back
            assert made.scheduler.tasks[key].processing_on.name == "rollout-1"
        found = await made.results()
        assert {result["migrations"] for result in found.values()} == {1}
        decoded = sum(made.plugin(i).serving.engine.measures()["decoded"] for i in range(3))
        assert decoded == sum(result["tokens"] for result in found.values())  # nothing was generated again
        assert decoded == sum(made.plugin(i).tokens for i in range(3))
        assert (await made.client.scheduler.laminar_repack_status())["trajectories_moved"] == 24

    check(scenario, tmp_path)


def test_a_target_that_dies_in_the_middle_of_a_move_costs_nothing(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 16)
        await made.client.scheduler.laminar_repack_move(source="rollout-0", target="rollout-1")
        await made.replicas[1].close()
        found = await made.results()
        assert all(result["migrations"] <= 2 for result in found.values())
        assert not made.repack.moves.of_key and not made.repack.moves.original

    check(scenario, tmp_path)


def test_a_source_that_dies_in_the_middle_of_a_move_costs_nothing(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 16)
        await asyncio.sleep(0.6)  # tokens reach the partial pool
        await made.client.scheduler.laminar_repack_move(source="rollout-0", target="rollout-1")
        await made.replicas[0].close()
        await made.results()
        assert not made.repack.moves.bulks

    check(scenario, tmp_path)


def test_trajectories_that_finish_in_the_middle_of_a_move_are_counted_once(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 48)
        there, moves = 0, 0
        while any(future.status == "pending" for future in made.futures):
            if not made.repack.moves.bulks:
                await made.client.scheduler.laminar_repack_move(
                    source=f"rollout-{there}", target=f"rollout-{1 - there}"
                )
                there, moves = 1 - there, moves + 1
            await asyncio.sleep(0.05)
        found = await made.results()
        assert moves > 3 and max(result["migrations"] for result in found.values()) >= 3

    check(scenario, tmp_path, time_scale=60.0)


def test_an_attempt_that_was_superseded_is_not_moved(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        [future] = await made.start(0, 1)
        run_id = made.scheduler.tasks[future.key].run_id
        assert made.repack.moves.begin(*(w.address for w in made.replicas[:2]), [(future.key, run_id - 1)], "") is None
        made.handover(0).depart("move-x", made.replicas[1].address, [(future.key, run_id - 1)])
        await asyncio.sleep(0.1)
        assert made.generating(0) == 1 and not made.handover(1).adopted

    check(scenario, tmp_path, time_scale=1.0)


def test_a_state_pushed_for_a_later_attempt_is_not_taken(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        made.handover(0).adopt([{"key": "k", "run_id": 7, "ids": [1]}])
        assert made.handover(0).arrival("k", 7) is None
        made.handover(0).adopt([{"key": "k", "run_id": 7, "ids": [1]}])
        assert made.handover(0).arrival("k", 8) is not None

    check(scenario, tmp_path, replicas=1)


def test_a_drained_replica_is_emptied_and_retired_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 64)
        answer = await made.client.scheduler.laminar_drain(worker="rollout-0")
        assert answer["moved"] == 64
        await until(lambda: made.replicas[0].address not in made.scheduler.workers, "retirement")
        await until(lambda: made.generating(1) + made.generating(2) == 64, "all of them elsewhere")
        assert made.generating(1) and made.generating(2)
        found = await made.results()
        assert {result["migrations"] for result in found.values()} == {1}

    check(scenario, tmp_path)


def test_the_last_replica_is_not_drained(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        with pytest.raises(LaminarError, match="only replica"):
            await made.client.scheduler.laminar_drain(worker="rollout-0")
        with pytest.raises(LaminarError, match="no replica is called 'rollout-7'; there are rollout-0"):
            await made.client.scheduler.laminar_repack_move(source="rollout-7")

    check(scenario, tmp_path, replicas=1)


def test_tails_are_packed_by_themselves_and_the_emptied_replicas_reported(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        freed: list[Any] = []
        made.client.subscribe_topic(f"laminar-freed-{made.run}", lambda event: freed.append(event[1]["worker"]))
        for number in range(3):
            await made.start(number, 48)
        found = await made.results()
        status = await made.client.scheduler.laminar_repack_status()
        assert status["replicas_freed"] >= 1 and status["trajectories_moved"] >= 1
        await until(lambda: len(freed) == status["replicas_freed"], "freed events")
        assert set(freed) <= {worker.address for worker in made.replicas}
        assert max(result["migrations"] for result in found.values()) >= 1
        events = [event for _, event in await made.client.get_events(f"laminar-{made.run}")]
        assert {"release", "move"} <= {event["action"] for event in events}
        assert all(event["gain_expected"] > 0 for event in events if event["action"] == "release")

    check(scenario, tmp_path, automatic=True, time_scale=60.0)


def test_two_triggers_at_once_are_one_plan(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        asked: list[str] = []
        look = made.repack.look_and_plan

        async def counted(why: str) -> Any:
            asked.append(why)
            return await look(why)

        made.repack.look_and_plan = counted  # type: ignore[method-assign]
        for version in (2, 3, 4):
            await made.client.scheduler.laminar_repack_published(version=version)
        await until(lambda: bool(asked), "a look")
        assert asked == ["published"]

    check(scenario, tmp_path, replicas=1, period=1e6)


def test_trajectories_of_the_last_replica_wait_for_another_one(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 4)
        await made.replicas[0].close()
        states = {made.scheduler.tasks[future.key].state for future in made.futures}
        assert states == {"no-worker"}  # not on the data worker, which could not run them
        await made.add_replica()
        await made.results()

    check(scenario, tmp_path, replicas=1)


@pytest.fixture
def endless_model(tmp_path: Path) -> str:
    """The quickstart's model without a stop token: every answer is as long as it may be."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**values, "eos_token_id": None}))
    return str(copy)


def test_a_greedy_answer_of_a_real_engine_is_the_same_however_often_it_moves(
    tmp_path: Path, endless_model: str
) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=160)

    async def scenario(made: Fleet) -> None:
        for moves in (0, 1, 2, 5):
            [future] = await made.start(0, 1, name=f"moved{moves}-", sampling=greedy)
            for move in range(moves):
                await move_after(made, 160 * (move + 1) // (moves + 1), source=move % 2, target=1 - move % 2)
            result = await asyncio.wait_for(future, DEADLINE)
            assert (result["tokens"], result["migrations"], result["versions"]) == (160, moves, 1)
        rows = Experience(made.url).query("select * from experience order by migrations").to_pylist()
        assert [row["migrations"] for row in rows] == [0, 1, 2, 5]
        for row in rows[1:]:
            assert row["response_ids"] == rows[0]["response_ids"]
            assert row["logprobs"] == pytest.approx(rows[0]["logprobs"], abs=1e-4)
        assert sum(made.plugin(i).tokens for i in range(2)) == 4 * 160

    check(scenario, tmp_path, replicas=2, model=endless_model, time_scale=1.0)


async def move_after(made: Fleet, tokens: int, *, source: int, target: int) -> None:
    """Move the one that runs on ``source`` once it has so many tokens."""

    def enough() -> bool:
        made.plugin(source).collect()
        return any(attempt.tokens >= tokens for attempt in made.plugin(source).attempts.values())

    await until(enough, f"{tokens} tokens")
    await made.client.scheduler.laminar_repack_move(source=f"rollout-{source}", target=f"rollout-{target}")
    await until(lambda: made.generating(target) == 1, "it on the other replica")
