"""Hand-overs on a real scheduler with emulated replicas: moves, deaths in the middle of them, drain, triggers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from laminar.errors import LaminarError
from laminar_dask.trajectories import submit
from tests.fleet import Fleet, check, until


def test_a_running_trajectory_moves_with_its_key_and_future_and_each_token_counts_once(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        futures = await made.start(0, 24)
        keys = [future.key for future in futures]
        before = {key: made.scheduler.tasks[key].worker_restrictions for key in keys}
        answer = await made.client.scheduler.laminar_repack_move(source="rollout-0", target="rollout-1")
        assert answer["moved"] == 24

        def there(key: str) -> bool:
            task = made.scheduler.tasks[key]
            on_target = task.state == "processing" and task.processing_on.name == "rollout-1"
            return task.state == "memory" or on_target  # on a busy machine short ones are done by now

        await until(lambda: not made.generating(0) and all(map(there, keys)), "24 trajectories on the target")
        assert [future.key for future in futures] == keys
        for key in keys:
            if made.scheduler.tasks[key].state == "processing":
                assert made.scheduler.tasks[key].worker_restrictions == before[key]  # the user's own is back
        found = await made.results()
        assert {result["migrations"] for result in found.values()} == {1}
        decoded = sum(made.plugin(i).serving.engine.measures()["decoded"] for i in range(3))
        assert decoded == sum(result["tokens"] for result in found.values())  # nothing was generated again
        assert decoded == sum(made.plugin(i).inside.tokens for i in range(3))
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


def test_what_is_meant_for_a_replica_that_is_gone_goes_to_another_replica(tmp_path: Path) -> None:
    """Dask's loose restrictions let go of the resources too: any worker would get it, the data worker included."""

    async def scenario(made: Fleet) -> None:
        gone = made.replicas[1].address
        await made.replicas[1].close()
        made.futures += submit(made.client, [made.request("g", sample, 40) for sample in range(40)], near=gone)
        await made.results()  # the data worker, which has nothing to do, could not have run one

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
        made.handover(0).departures.depart("move-x", made.replicas[1].address, [(future.key, run_id - 1)])
        await asyncio.sleep(0.1)
        assert made.generating(0) == 1 and not made.handover(1).arrivals.waiting

    check(scenario, tmp_path, time_scale=1.0)


def pushed(made: Fleet, *, run_id: int = 7, tokens: int = 100) -> dict[str, Any]:
    """A state as it comes from another replica, of a trajectory whose task may come or not."""
    request = made.request("pushed", 0, 1)
    answer = {"version": 1, "ids": [tokens], "logprobs": [0.0], "waits_until": 0.0, "migrations": 1}
    return {**answer, "key": request.key, "request": request, "run_id": run_id}


def test_a_state_pushed_for_a_later_attempt_is_not_taken(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        arrivals, state = made.handover(0).arrivals, pushed(made)
        assert arrivals.adopt("move-1", [state]) == []  # no version is loaded: its task has to begin it
        assert arrivals.take(state["key"], 7) is None
        assert arrivals.take(state["key"], 8) is not None
        assert arrivals.take(state["key"], 8) is None

    check(scenario, tmp_path, replicas=1)


def test_a_moved_trajectory_generates_before_its_task_comes_and_the_task_takes_it_over(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 1)  # so that the version is loaded
        serving, state = made.plugin(0).serving, pushed(made, run_id=-1)
        assert made.handover(0).arrivals.adopt("move-1", [state]) == [state["key"]]
        assert serving.engine.gauges().running == serving.inside == 2
        before = made.plugin(0).inside.tokens
        made.futures += submit(made.client, [state["request"]], near=made.replicas[0].address)
        found = await made.results()
        own = found[state["request"].id]
        assert own["migrations"] == 1 and own["versions"] == 1
        decoded, here = serving.engine.measures()["decoded"], made.plugin(0).inside.tokens
        assert decoded == sum(result["tokens"] for result in found.values()) - 100 == here > before
        assert serving.inside == 0 and not made.plugin(0).inside.running

    check(scenario, tmp_path, replicas=1)


def test_what_was_begun_for_a_task_that_does_not_come_is_taken_out_again(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 1)
        serving, arrivals, state = made.plugin(0).serving, made.handover(0).arrivals, pushed(made)
        arrivals.adopt("move-1", [state])
        arrivals.disown("move-0", [state["key"]])  # of an earlier move: this one is still awaited
        assert serving.inside == 2
        arrivals.disown("move-1", [state["key"]])
        await until(lambda: serving.inside == 1, "the engine without it")
        assert arrivals.take(state["key"], 8) is None and list(made.plugin(0).inside.running) == ["g0-0"]
        arrivals.adopt("move-2", [state])
        arrivals.adopt("move-3", [state])  # pushed twice: once in the engine at most
        await until(lambda: serving.inside < 3 and serving.engine.gauges().running <= 2, "one of them")
        arrivals.disown("move-3", [state["key"]])
        await made.results()
        await until(lambda: serving.inside == 0, "an empty replica")

    check(scenario, tmp_path, replicas=1)


def test_a_drained_replica_is_emptied_and_retired_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario(made: Fleet) -> None:
        await made.start(0, 64)
        answer = await made.client.scheduler.laminar_drain(worker="rollout-0")
        await until(lambda: made.replicas[0].address not in made.scheduler.workers, "retirement")
        found = await made.results()
        migrations = [result["migrations"] for result in found.values()]
        assert max(migrations) == 1
        assert 1 < sum(migrations) == answer["moved"] <= 64  # on a busy machine short ones are done by then
        assert made.plugin(1).inside.tokens and made.plugin(2).inside.tokens

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
        await until(lambda: made.repack.reviews.done > 0, "a review")
        events = [event for _, event in await made.client.get_events(f"laminar-{made.run}")]
        by_action: dict[str, list[Any]] = {}
        for event in events:
            by_action.setdefault(event["action"], []).append(event)
        plans = {event["plan"] for event in by_action["plan"]}
        for action, names in {
            "plan": ["why", "gain_expected", "cost_expected", "releases"],
            "release": ["why", "gain_expected", "cost_expected", "trajectories"],
            "move": ["why", "seconds", "trajectories"],
            "review": ["gain_expected", "gain_measured", "cost_expected", "cost_measured"],
        }.items():
            assert by_action[action]
            for event in by_action[action]:
                assert event["plan"] in plans and set(names) <= set(event)
        assert all(event["gain_expected"] > 0 for event in by_action["release"])
        assert status["block_ms_max"] > 0 and status["placed_ms_median"] is not None

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
