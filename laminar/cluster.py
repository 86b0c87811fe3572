"""The processes of a run on one machine: a scheduler and one worker a role, under nannies, on loopback only.

Roles are Dask resources (``data``, ``relay``, ``trainer``, ``rollout``), so that the same flow can be placed on
any cluster whose workers offer them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dask
import psutil
from distributed import Client, Nanny, Scheduler, SpecCluster, Status
from tornado.ioloop import PeriodicCallback

from laminar.errors import LaminarError, UserError
from laminar.watch.control import STOP, control_topic
from laminar.weights.segment import in_use, remove_segments, segment_root

__all__ = ["Needs", "RunningCluster", "start", "worker_spec"]

START_DEADLINE = 120.0
"""Seconds for all workers to register; a cold disk and two busy cores can take one of them."""

LOOK_SECONDS = 1.0
"""How often it is seen to that every role has a nanny."""

CONFIG = {
    # Rewards run in processes of their own, which a daemonic worker could not start.
    "distributed.worker.daemon": False,
    # Weights and KV caches count as process memory: Dask would kill the worker that holds them.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    # A trajectory survives as many deaths of its workers as happen; what gives up is the conductor, with a reason.
    "distributed.scheduler.allowed-failures": 100,
    # Trajectories are placed by us; stealing sees only averages.
    "distributed.scheduler.work-stealing": False,
    # Not Dask's own: its MALLOC_TRIM_THRESHOLD_ fixes glibc's mmap threshold at 128 KiB, so that every larger
    # tensor is mapped and faulted in anew, which halves the speed of a CPU engine. Ours is in ENVIRONMENT.
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.worker.preload": ["laminar_dask.preload"],
    # One that is alive but says nothing (stopped, swapped out, its loop blocked) is restarted by its nanny after this
    # long, and what it was given goes on elsewhere. Looked at once in this time, so it takes up to twice as long.
    # Engines load and steps run in threads: they hold the loop for a second or two.
    "distributed.scheduler.worker-ttl": "30s",
    # Dask's sampling profiler looks at threads that run tasks; ours are coroutines and engines.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.limit": "30s",
    "distributed.admin.low-level-log-length": 200,
    # A role may stay without a worker for as long as a restart takes.
    "distributed.scheduler.no-workers-timeout": "300s",
    # Dask ends the nanny of a worker that is away for so long: a restart on busy cores can take more than its 15 s.
    "distributed.deploy.lost-worker-timeout": f"{START_DEADLINE}s",
}

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class Needs:
    """What a flow asks of a cluster: the most that one of its stages needs."""

    replicas: int = 0
    """Rollout workers."""
    slots: int = 1
    """Trajectories that one of them runs at once: its number of Dask threads."""
    trainer: bool = False
    relays: int = 1
    """Hosts to emulate on this machine: a relay each, the trainer on the first, replicas on all in turn."""


def worker_spec(needs: Needs) -> dict[str, dict[str, Any]]:
    """Name, resources and threads of every worker.

    >>> sorted(worker_spec(Needs(replicas=2, slots=64, trainer=True)))
    ['data', 'relay', 'rollout-0', 'rollout-1', 'trainer']
    >>> spec = worker_spec(Needs(replicas=2, trainer=True, relays=2))
    >>> {name: spec[name]["options"]["env"]["LAMINAR_HOST"] for name in ("relay", "relay-1", "rollout-1", "trainer")}
    {'relay': 'host0', 'relay-1': 'host1', 'rollout-1': 'host1', 'trainer': 'host0'}
    """
    roles: dict[str, tuple[int, dict[str, float]]] = {"data": (8, {"data": 1, "task": 1})}
    hosts = {}
    for i in range(needs.relays if needs.replicas else 0):
        name = f"relay-{i}" if i else "relay"
        roles[name] = (1, {"relay": 1})
        hosts[name] = i
    if needs.trainer:
        roles["trainer"] = (2, {"trainer": 1})
    for i in range(needs.replicas):
        roles[f"rollout-{i}"] = (needs.slots, {"rollout": needs.slots})
        hosts[f"rollout-{i}"] = i % needs.relays
    return {
        name: {
            "cls": Nanny,
            "options": {
                "host": "127.0.0.1",
                "dashboard_address": None,
                "dashboard": False,
                "nthreads": threads,
                "resources": resources,
                "memory_limit": 0,
                "silence_logs": logging.CRITICAL,
                "env": ENVIRONMENT | (_emulated(hosts.get(name, 0)) if needs.relays > 1 else {}),
                "death_timeout": START_DEADLINE,
            },
        }
        for name, (threads, resources) in roles.items()
    }


def _emulated(host: int) -> dict[str, str]:
    """What tells a worker on which emulated host it is, so that it finds the weights of that one."""
    return {"LAMINAR_HOST": f"host{host}"}


class RunningCluster:
    """A started cluster and the client that talks to it."""

    def __init__(self, cluster: SpecCluster, client: Client, run_id: str) -> None:
        self.cluster = cluster
        self.client = client
        self.run_id = run_id

    @property
    def dashboard_link(self) -> str:
        """Where the Dask dashboard listens (loopback)."""
        return str(self.cluster.dashboard_link)

    def request_stop(self) -> None:
        """Ask the run to stop: no new trajectories, drain, checkpoint. Returns at once."""
        self.client.log_event(control_topic(self.run_id), STOP)

    def kill(self) -> None:
        """End every process of the cluster now, without ceremony."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """Worker processes and all that they started."""
        found: dict[int, psutil.Process] = {}
        for nanny in self.cluster.workers.values():
            pid = nanny.pid
            if pid is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = psutil.Process(pid)
                found.update({p.pid: p for p in [*worker.children(recursive=True), worker]})
        return list(found.values())


@contextlib.contextmanager
def start(needs: Needs, run_id: str) -> Iterator[RunningCluster]:
    """Start the roles; on leaving end every process and remove the run's shared memory, whatever happened.

    Raises
    ------
    UserError
        A run of this id is going on on this host.
    LaminarError
        Not all workers came up within ``START_DEADLINE`` seconds.
    """
    if in_use(segment_root(run_id)):
        raise UserError(f"a run {run_id} is going on on this host ({segment_root(run_id)}); give another --run-id")
    spec = worker_spec(needs)
    with dask.config.set(CONFIG), _quiet():
        cluster = SpecCluster(
            workers=spec,
            scheduler={
                "cls": Scheduler,
                "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "dashboard": True},
            },
            silence_logs=logging.CRITICAL,
            name=f"laminar-{run_id}-{os.getpid()}",
        )
        look = PeriodicCallback(functools.partial(_keep_up, cluster), 1000 * LOOK_SECONDS)
        running: RunningCluster | None = None
        ours: list[psutil.Process] = []
        try:
            client = Client(cluster, timeout=START_DEADLINE, set_as_default=False)
            running = RunningCluster(cluster, client, run_id)
            try:
                client.wait_for_workers(len(spec), timeout=START_DEADLINE)
            except TimeoutError as error:
                raise LaminarError(
                    f"expected {len(spec)} workers ({', '.join(spec)}) within {START_DEADLINE:.0f} s: {error}"
                ) from error
            cluster.loop.add_callback(look.start)
            yield running
        finally:
            cluster.loop.add_callback(look.stop)
            if running is not None:
                ours = running.processes()
                with contextlib.suppress(TimeoutError, OSError):
                    running.client.close(timeout=5)
            with contextlib.suppress(TimeoutError, OSError):
                cluster.close(timeout=20)
            _end(ours)
            for host in range(needs.relays):
                remove_segments(segment_root(run_id, f"host{host}" if needs.relays > 1 else None))


def _keep_up(cluster: SpecCluster) -> None:
    """Start a role again whose nanny has given it up, because the worker closed itself or did not start again."""
    if cluster.status is not Status.running:
        return
    roles = cluster.scheduler.plugins.get("laminar-roles")
    for name, nanny in list(cluster.workers.items()):
        if nanny.status in (Status.closed, Status.failed):
            del cluster.workers[name]
            if roles is not None and name in roles.drained:
                del cluster.worker_spec[name]
    if cluster.worker_spec.keys() - cluster.workers.keys():
        cluster.scale(len(cluster.worker_spec))  # starts those that are not there


def _end(processes: list[psutil.Process]) -> None:
    """Make sure that what we started is gone: 5 s to go by itself, then SIGKILL."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own loggers say nothing on the user's terminal; what matters reaches the run's events."""
    names = ("distributed", "tornado", "bokeh", "asyncio")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
