"""Hosts emulated on one machine: a network namespace each, joined by a bridge, every link limited at both ends.

Needs root and iproute2 (``ip``, ``tc`` with ``tbf``). Everything is made inside namespaces of unique names, and they
are removed afterwards, whatever happened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAYLOAD_SHARE", "EmulatedHosts", "emulated_hosts", "loopback", "why_not"]

PAYLOAD_SHARE = 1448 / 1514
"""Of a link's bits, those that are payload of TCP: 1448 of each full Ethernet frame."""

PACED = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""The default of new sockets; each network namespace has its own."""

DEADLINE = 20.0


@dataclass(frozen=True, slots=True)
class EmulatedHosts:
    """For each host the name of its namespace and its address."""

    namespaces: list[str]
    addresses: list[str]


def why_not() -> str | None:
    """Why hosts cannot be emulated here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"iproute2 is not installed ({', '.join(missing)})"
    try:
        with emulated_hosts(1, 1000):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"


@contextmanager
def emulated_hosts(count: int, megabits: int) -> Iterator[EmulatedHosts]:
    """Hosts whose links carry so many Mbit/s each way.

    Raises
    ------
    subprocess.CalledProcessError
        The kernel cannot do it, or this user must not.
    """
    prefix = f"lm{uuid.uuid4().hex[:6]}"
    switch = f"{prefix}s"
    names = [f"{prefix}h{index}" for index in range(count)]
    addresses = [f"10.77.0.{index + 1}" for index in range(count)]
    burst = f"{max(256, megabits // 4)}kb"  # more than one packet that the kernel has not cut yet
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"p{index}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for space, device in ((name, "eth0"), (switch, port)):
                limit = ("rate", f"{megabits}mbit", "burst", burst, "latency", "100ms")
                _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield EmulatedHosts(names, addresses)
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE, check=False)


@contextmanager
def loopback(no_hosts: str | None) -> Iterator[tuple[str | None, str]]:
    """Where relays that stand for hosts on one machine's loopback shall be: a namespace, or None for the caller's; and
    one line for people.

    A system whose default is BBR paces every socket of UCX, which cannot be told otherwise. Loopback is no link.

    Parameters
    ----------
    no_hosts
        What ``why_not`` says.
    """
    default = PACED.read_text().strip()
    if default != "bbr" or no_hosts is not None:
        yield None, f"the machine's own, under {default}"
        return
    name = f"lm{uuid.uuid4().hex[:6]}l"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "netns", "exec", name, "sh", "-c", f"echo cubic > {PACED}")
        yield name, f"of a network namespace, under cubic: the machine's own is under {default}, which paces"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
