"""What each worker process of a local cluster does first (Dask's ``distributed.worker.preload``)."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["dask_setup"]


def dask_setup(worker: Any) -> None:
    """Keep the event loop's own tracebacks off the user's terminal: a heartbeat that meets a closing worker writes
    one at the end of many runs. What matters reaches the run's events."""
    logging.getLogger("tornado.application").setLevel(logging.CRITICAL)
