"""Relays in processes of their own, without Dask: what the bench measures and the fault tests kill."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from laminar.bench.relay_process import Setting, serve
from laminar.weights.chain import Member, Plan, chunk_bytes
from laminar.weights.forward import PROGRESS_DEADLINE, Report
from laminar.weights.layout import Layout, TensorSpec
from laminar.weights.scratch import scratch

__all__ = ["RelayProcess", "bytes_layout", "chain_of", "relay_processes"]

START_DEADLINE = 60.0
END_DEADLINE = 10.0


def bytes_layout(nbytes: int) -> Layout:
    """A layout of one tensor of bytes."""
    return Layout.pack([TensorSpec("weights", "uint8", (nbytes,), nbytes)])


class RelayProcess:
    """A relay's data plane in a child process, steered through a pipe."""

    def __init__(self, index: int, setting: Setting) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["laminar.bench.relay_preload"])
        self.name = f"relay-{index}"
        self.setting = setting
        self.reports: list[Report] = []
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, setting), daemon=True)
        self.process.start()
        theirs.close()

    def started(self) -> Member:
        """Wait until it listens; how others see it."""
        return Member(self.name, self.setting.host, str(self._answer(START_DEADLINE)))

    def call(self, what: str, *arguments: Any, deadline: float = 60.0) -> Any:
        """Have the process do something; its answer."""
        self._pipe.send((what, arguments))
        return self._answer(deadline)

    def wait_for(
        self, what: str, *, deadline: float = 60.0, where: Callable[[Report], bool] = lambda it: True
    ) -> Report:
        """The first report of a kind, come or to come."""
        until = time.monotonic() + deadline
        seen = 0
        while True:
            for report in self.reports[seen:]:
                if report.what == what and where(report):
                    return report
            seen = len(self.reports)
            left = until - time.monotonic()
            if left < 0 or not self._pipe.poll(left):
                said = [(it.what, it.version, it.why) for it in self.reports]
                raise TimeoutError(f"{self.name} did not report `{what}` in {deadline:g} s; it said {said}")
            kind, value = self._received()
            assert kind == "report", f"{self.name} answered {value!r} to nobody"
            self.reports.append(value)

    def signal(self, number: int) -> float:
        """Send the process a signal; when (unix seconds)."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, number)
        return time.time()

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.join(END_DEADLINE)
        self._pipe.close()

    def _answer(self, deadline: float) -> Any:
        until = time.monotonic() + deadline
        while True:
            if not self._pipe.poll(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"{self.name} did not answer in {deadline:g} s")
            kind, value = self._received()
            if kind == "error":
                raise RuntimeError(f"{self.name}: {value}")
            if kind == "answer":
                return value
            self.reports.append(value)

    def _received(self) -> tuple[str, Any]:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self.process.join(END_DEADLINE)
            raise RuntimeError(f"{self.name} died (exit code {self.process.exitcode})") from None
        return kind, value


@contextmanager
def relay_processes(
    count: int,
    transport: str = "tcp",
    *,
    hosts: Sequence[str] = (),
    namespaces: Sequence[str | None] = (),
    progress_deadline: float = PROGRESS_DEADLINE,
) -> Iterator[tuple[list[RelayProcess], list[Member]]]:
    """Start relays, one of them more than there are hops, and end them and remove their memory whatever happens.

    Parameters
    ----------
    hosts, namespaces
        For each relay the address to listen on and the network namespace to be in, None: the caller's; without them
        all are on loopback.
    """
    relays: list[RelayProcess] = []
    with scratch("bench-relays") as base:
        try:
            for index in range(count):
                host = hosts[index] if hosts else "127.0.0.1"
                space = namespaces[index] if namespaces else None
                setting = Setting(base / f"laminar-host{index}", transport, host, space, progress_deadline)
                relays.append(RelayProcess(index, setting))
            yield relays, [relay.started() for relay in relays]
        finally:
            for relay in relays:
                relay.end()


def chain_of(members: Sequence[Member], version: int, nbytes: int, *, epoch: int = 1, chunk: int = 0) -> Plan:
    """The plan that sends a version down the members as they stand."""
    chunk = chunk or chunk_bytes(nbytes, len(members) - 1)
    return Plan(version, epoch, tuple(members), chunk, 0, nbytes)
