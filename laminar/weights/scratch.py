"""A folder in shared memory for a bench or a test: gone when its process ends, or swept at the next start."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar.weights.locks import EXCLUSIVE, hold, release
from laminar.weights.segment import PREFIX, SCRATCH_LOCK, sweep

__all__ = ["scratch"]

DEADLINE = 5.0
"""Seconds for a lock that nobody else knows of."""


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A new folder ``/dev/shm/laminar-NAME-…``, after what dead processes left there was removed."""
    sweep()
    root = Path("/dev/shm") / f"{PREFIX}{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    lock = hold(root / SCRATCH_LOCK, EXCLUSIVE, deadline=DEADLINE)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)  # whoever still uses it keeps what is mapped
        release(lock)
