"""``run.json``: what was run, with what, and how it ended."""

from __future__ import annotations

import os
import platform
import socket
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import xxhash

if TYPE_CHECKING:
    from laminar.flow.plan import Plan

__all__ = ["ending", "is_alive", "is_here", "record_of"]

_CLOCK_SECONDS = 5.0
"""How far the clock may be set between two looks at when a process started."""

_PACKAGES = ("laminar-flow", "torch", "transformers", "dask", "distributed")


def record_of(plan: Plan) -> dict[str, Any]:
    """The record of a run that begins now."""
    file = plan.flow.function.__code__.co_filename
    return {
        "run_id": plan.context.run_id,
        "flow": plan.flow.name,
        "status": "running",
        "started": _now(),
        "ended": None,
        "seconds": None,
        "error": None,
        "parameters": plan.parameters,
        "file": file,
        "source_hash": _hash_of(file),
        "nodes": [{"name": node.name, "kind": node.kind, "depends_on": node.depends_on} for node in plan.trace.nodes],
        "versions": {"python": platform.python_version(), **_versions()},
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
    }


def is_here(record: dict[str, Any]) -> bool:
    """Whether a run was started on this machine."""
    return bool(record.get("host") == socket.gethostname())


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the process that wrote a record on this machine is still there, and not another of its number.

    Numbers come again: soon after a boot, and in a container at once.
    """
    try:
        started = psutil.Process(int(record["pid"])).create_time()
    except (KeyError, psutil.NoSuchProcess):
        return False
    return bool(abs(started - float(record.get("process_started", started))) < _CLOCK_SECONDS)


def ending(status: str, seconds: float, error: str | None = None) -> dict[str, Any]:
    """What is added to the record when the run ends."""
    return {"status": status, "ended": _now(), "seconds": round(seconds, 3), "error": error}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _hash_of(file: str) -> str | None:
    """xxh3 of the flow's file; None where it was typed at a prompt."""
    path = Path(file)
    return xxhash.xxh3_128_hexdigest(path.read_bytes()) if path.is_file() else None


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
