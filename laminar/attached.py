"""A run on a cluster that somebody else has started: its workers offer the roles as Dask resources.

What this machine starts itself is in ``laminar.cluster``. Here no process is started or ended; when the run is over,
everything of it is taken off the workers again, its weights in shared memory with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from distributed import Client, Scheduler

from laminar.cluster import Needs
from laminar.errors import LaminarError, UserError
from laminar.flow.protocols import StartCluster
from laminar.watch.control import BEGIN, STOP, control_topic

__all__ = ["AttachedCluster", "attach", "attached_to", "missing"]

CONNECT_DEADLINE = 30.0
"""Seconds for the scheduler to answer."""
PLUGINS = "laminar-"
"""How the names of all our plugins begin."""
ROLES = frozenset({"data", "relay", "trainer", "rollout"})


class AttachedCluster:
    """A run's way to a cluster that is not its own."""

    def __init__(self, client: Client, run_id: str) -> None:
        self.client = client
        self.run_id = run_id

    @property
    def dashboard_link(self) -> str | None:
        """Where the dashboard listens."""
        return self.client.dashboard_link or None

    def request_stop(self) -> None:
        """Ask the run to stop: no new trajectories, drain, checkpoint. Returns at once."""
        self.client.log_event(control_topic(self.run_id), STOP)

    def kill(self) -> None:
        """Take the run off the workers now; their processes go on, without it."""
        _take_off(self.client)


def attached_to(address: str) -> StartCluster:
    """What ``laminar.flow.run.carry_out`` takes in place of a cluster of its own."""
    return lambda needs, context: attach(address, Needs(**needs), context.run_id)


@contextlib.contextmanager
def attach(address: str, needs: Needs, run_id: str) -> Iterator[AttachedCluster]:
    """Use the cluster of a scheduler; on leaving nothing of the run is left on it, whatever happened.

    Raises
    ------
    UserError
        Nobody answers at ``address``, its workers do not offer what the flow needs, or a run goes on there.
    """
    try:
        client = Client(address, timeout=CONNECT_DEADLINE, set_as_default=False, name=f"laminar-{run_id}")
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {address}: {error}; start one, or leave --scheduler out"
        ) from error
    try:
        lacking = missing(needs, client.scheduler_info(n_workers=-1)["workers"])
        if lacking is not None:
            raise UserError(f"the cluster at {address} cannot run this flow: {lacking}")
        if client.run_on_scheduler(_busy):
            raise UserError(f"a run goes on on the cluster at {address}; wait until it ends, or stop it")
        _take_off(client)  # what a run left whose command was killed
        client.log_event(control_topic(run_id), BEGIN)
        try:
            yield AttachedCluster(client, run_id)
        except BaseException:
            with contextlib.suppress(LaminarError):  # what went wrong before matters more
                _take_off(client)
            raise
        _take_off(client)
    finally:
        with contextlib.suppress(OSError, TimeoutError):
            client.close(timeout=5)


def missing(needs: Needs, workers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What a flow needs that a cluster's workers do not offer, and what to do about it; None if nothing is missing.

    Parameters
    ----------
    workers
        By address: ``resources`` and ``nthreads`` of each, as Dask's ``scheduler_info`` says.

    Example
    -------
    >>> workers = {"tcp://10.0.0.1:1": {"resources": {"data": 1, "task": 1}, "nthreads": 8}}
    >>> missing(Needs(), workers)
    >>> missing(Needs(trainer=True), workers).partition(";")[0]
    'no worker offers `trainer`'
    >>> workers["tcp://10.0.0.1:2"] = {"resources": {"relay": 1}, "nthreads": 1}
    >>> workers["tcp://10.0.0.2:1"] = {"resources": {"rollout": 4}, "nthreads": 4}
    >>> missing(Needs(replicas=1, slots=4), workers)
    'no worker on 10.0.0.2 offers `relay`, which each host needs that has a replica or the trainer'
    """
    wanted = {"data": {"data": 1, "task": 1}}
    if needs.trainer:
        wanted["trainer"] = {"trainer": 1}
    if needs.replicas:
        wanted |= {"relay": {"relay": 1}, "rollout": {"rollout": needs.slots}}
    for role, resources in wanted.items():
        found = [address for address, worker in workers.items() if _offers(worker, resources)]
        count = needs.replicas if role == "rollout" else 1
        if len(found) < count:
            asked = ",".join(f"{name}={amount}" for name, amount in resources.items())
            threads = f" --nthreads {needs.slots}" if role == "rollout" else ""
            how = f'dask worker SCHEDULER --no-dashboard --memory-limit 0{threads} --resources "{asked}"'
            have = "no worker offers" if not found else f"{len(found)} of {count} workers offer"
            return f"{have} `{asked if role == 'rollout' else role}`; start one: {how}"
    alone = sorted((_hosts(workers, "rollout") | _hosts(workers, "trainer")) - _hosts(workers, "relay"))
    if needs.replicas and alone:
        return f"no worker on {alone[0]} offers `relay`, which each host needs that has a replica or the trainer"
    return None


def _offers(worker: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    threads = int(resources.get("rollout", 1))
    return worker["nthreads"] >= threads and all(worker["resources"].get(k, 0) >= v for k, v in resources.items())


def _hosts(workers: Mapping[str, Mapping[str, Any]], role: str) -> set[str]:
    offering = (address for address, worker in workers.items() if role in worker["resources"])
    return {address.rpartition("://")[2].rpartition(":")[0] for address in offering}


def _busy(dask_scheduler: Scheduler) -> bool:
    """Whether a stage of some run goes on. (On the scheduler.)"""
    going_on = ("waiting", "no-worker", "queued", "processing")
    tasks = dask_scheduler.tasks.values()
    return any(task.state in going_on and set(task.resource_restrictions or ()) & ROLES for task in tasks)


async def _unregister(dask_scheduler: Scheduler) -> list[str]:
    """Unregister all that runs have registered; what could not be. (On the scheduler.)"""
    wrong = []
    for name in [name for name in reversed(dask_scheduler.worker_plugins) if name.startswith(PLUGINS)]:
        for worker, answer in (await dask_scheduler.unregister_worker_plugin(comm=None, name=name)).items():
            if answer["status"] != "OK":
                wrong.append(f"{name} on {worker}: {answer['exception']!r}")
    for name in [name for name in dask_scheduler.plugins if name.startswith(PLUGINS)]:
        await dask_scheduler.plugins[name].close()
        dask_scheduler.remove_plugin(name)
    return wrong


def _take_off(client: Client) -> None:
    """Relays remove their memory, engines and scorers end, and the scheduler forgets the run."""
    try:
        wrong = client.run_on_scheduler(_unregister)
    except OSError as error:
        wrong = [str(error)]
    if wrong:
        raise LaminarError(f"the run could not be taken off its cluster ({'; '.join(wrong)}); restart the cluster")
