"""What each worker process of a local cluster does first (Dask's ``distributed.worker.preload``)."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

__all__ = ["NICE", "dask_setup"]

NICE = 5
"""Of the worker processes: where all share a few cores, the scheduler, for whom all of them wait, goes first."""


def dask_setup(worker: Any) -> None:
    """Let the scheduler go first, and keep Dask's own tracebacks off the user's terminal: a heartbeat that meets a
    closing worker writes one at the end of many runs, when Dask's ``silence_logs`` no longer holds. So what it silences
    stays silent. All of it is in the worker's log on the dashboard, and what matters reaches the run's events."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    logging.getLogger("tornado.application").setLevel(logging.CRITICAL)
    for handler in logging.getLogger("distributed").handlers:
        handler.addFilter(functools.partial(_is_said, handler.level))


def _is_said(least: int, record: logging.LogRecord) -> bool:
    return record.levelno >= least
