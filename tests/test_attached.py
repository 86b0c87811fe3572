"""A run on somebody else's cluster: what it must offer, and that nothing is left on it."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed import Client, Event, LocalCluster

from laminar import attached
from laminar.attached import attach, missing
from laminar.cluster import Needs
from laminar.errors import RunFailed, UserError
from laminar.watch.control import control_topic, stop_wanted
from laminar.weights.segment import remove_segments, segment_root
from laminar_dask.relay import RelayPlugin
from laminar_dask.relay_chain import ChainPlugin

Start = Callable[..., LocalCluster]


@pytest.fixture
def cluster() -> Iterator[Start]:
    """A scheduler and one worker in this process."""
    started: list[LocalCluster] = []

    def start(**resources: float) -> LocalCluster:
        options = {"n_workers": 1, "threads_per_worker": 4, "dashboard_address": None, "host": "127.0.0.1"}
        started.append(LocalCluster(**options, processes=False, protocol="tcp", resources=resources))
        return started[-1]

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    yield start
    for each in started:
        each.close()


ALL = {"data": 1, "task": 1, "relay": 1, "trainer": 1, "rollout": 4}


@pytest.fixture
def run() -> Iterator[str]:
    run = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield run
    remove_segments(segment_root(run))


def worker(threads: int = 4, **resources: float) -> dict[str, Any]:
    return {"resources": resources, "nthreads": threads}


@pytest.mark.parametrize(
    ("needs", "workers", "why"),
    [
        (Needs(), {"tcp://h:1": worker(data=1)}, "no worker offers `data`; start one: dask worker"),
        (Needs(replicas=1, slots=4), {"tcp://h:1": worker(data=1, task=1, relay=1)}, "no worker offers `rollout=4`"),
        (
            Needs(replicas=2, slots=4),
            {"tcp://h:1": worker(data=1, task=1, relay=1), "tcp://h:2": worker(rollout=4)},
            "1 of 2 workers offer `rollout=4`; start one: dask worker SCHEDULER --no-dashboard --memory-limit 0 "
            '--nthreads 4 --resources "rollout=4"',
        ),
        (Needs(replicas=1, slots=4), {"tcp://h:1": worker(threads=2, **ALL)}, "no worker offers `rollout=4`"),
        (
            Needs(replicas=1, slots=4, trainer=True),
            {"tcp://g:1": worker(trainer=1), "tcp://h:2": worker(data=1, task=1, relay=1, rollout=4)},
            "no worker on g offers `relay`",
        ),
    ],
)
def test_what_a_cluster_lacks_is_one_line_that_says_how_to_start_it(
    needs: Needs, workers: dict[str, Any], why: str
) -> None:
    said = missing(needs, workers)
    assert said is not None
    assert said.startswith(why)
    assert "\n" not in said


def test_a_scheduler_that_does_not_answer_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "CONNECT_DEADLINE", 0.3)
    with pytest.raises(UserError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1"):
        with attach("tcp://127.0.0.1:1", Needs(), "r"):
            pass


def test_a_cluster_without_a_role_is_refused(cluster: Start) -> None:
    address = cluster(data=1, task=1).scheduler_address
    with pytest.raises(UserError, match=f"the cluster at {address} cannot run this flow: no worker offers `trainer`"):
        with attach(address, Needs(trainer=True), "r"):
            pass


def test_nothing_of_a_run_is_left_on_the_cluster_and_the_next_one_can_start(cluster: Start, run: str) -> None:
    local = cluster(**ALL)
    for again in (run, f"{run}-b"):
        with attach(local.scheduler_address, Needs(replicas=1, slots=4, trainer=True), again) as running:
            running.client.register_plugin(ChainPlugin())
            running.client.register_plugin(RelayPlugin(again))
            assert segment_root(again).exists()
            assert running.client.run_on_scheduler(lambda dask_scheduler: "laminar-chain" in dask_scheduler.plugins)
        assert not segment_root(again).exists()
        assert not [name for name in local.scheduler.plugins if name.startswith("laminar")]
        assert not [name for name in local.scheduler.worker_plugins if name.startswith("laminar")]


def test_a_run_that_fails_is_taken_off_too_and_its_own_error_is_what_is_seen(
    cluster: Start, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "CONNECT_DEADLINE", 2)
    local = cluster(**ALL)
    with pytest.raises(RunFailed, match="diverged"):
        with attach(local.scheduler_address, Needs(), run) as running:
            running.client.register_plugin(RelayPlugin(run))
            raise RunFailed("diverged")
    assert not segment_root(run).exists()
    with pytest.raises(RunFailed, match="diverged"):
        with attach(local.scheduler_address, Needs(), run):
            local.close()  # nothing can be taken off any more
            raise RunFailed("diverged")


def test_what_a_killed_command_left_is_taken_off_before_the_next_run(cluster: Start, run: str) -> None:
    local = cluster(**ALL)
    with Client(local.scheduler_address, set_as_default=False) as killed:
        killed.register_plugin(ChainPlugin())
        killed.register_plugin(RelayPlugin(run))
    assert segment_root(run).exists()
    with attach(local.scheduler_address, Needs(), "other"):
        assert not segment_root(run).exists()


def test_a_run_that_goes_on_later_does_not_meet_what_it_was_told_before(cluster: Start, run: str) -> None:
    local = cluster(**ALL)
    for _ in range(2):
        with attach(local.scheduler_address, Needs(), run) as running:
            assert not stop_wanted(running.client.get_events(control_topic(run)))
            running.request_stop()
            assert stop_wanted(running.client.get_events(control_topic(run)))


def test_a_cluster_on_which_a_run_goes_on_is_refused(cluster: Start) -> None:
    address = cluster(**ALL).scheduler_address

    async def stage(begun: str, over: str) -> None:
        await Event(begun).set()
        await Event(over).wait(timeout=60)

    with Client(address, set_as_default=False) as other:
        going_on = other.submit(stage, "begun", "over", resources={"data": 1}, pure=False)
        assert Event("begun", client=other).wait(timeout=20)
        with pytest.raises(UserError, match=f"a run goes on on the cluster at {address}; wait until it ends"):
            with attach(address, Needs(), "r"):
                pass
        Event("over", client=other).set()
        going_on.result(timeout=20)
