"""Compaction beside the table's work: segments become parts, parts of one size become a larger one."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pyarrow as pa

from laminar.experience.segment_files import SegmentFile
from laminar.experience.segments import Segments

__all__ = ["Compactor"]

log = logging.getLogger(__name__)


class Compactor:
    """Compacts in one thread of its own.

    Parameters
    ----------
    after
        Number of segments that become one part.
    moved
        Told of each part, before the files that it covers are deleted.
    executor
        Where it runs.
    """

    def __init__(
        self,
        after: int,
        moved: Callable[[Segments, SegmentFile], None],
        executor: Executor | None = None,
    ) -> None:
        self._after = after
        self._moved = moved
        self._executor = executor or ThreadPoolExecutor(1, "laminar-compact", initializer=_yield_to_others)
        self._running: dict[str, Future[None]] = {}

    def look(self, segments: Segments) -> None:
        """Compact if it is time. To be called after each append; returns at once."""
        running = self._running.get(segments.folder)
        if segments.loose and segments.loose % self._after == 0 and (running is None or running.done()):
            self._running[segments.folder] = self._executor.submit(self._compact, segments, segments.loose)

    def close(self) -> None:
        """Let what runs end."""
        self._executor.shutdown(wait=True)

    def _compact(self, segments: Segments, count: int) -> None:
        try:
            part = segments.compact(count)
            self._moved(segments, part)
            segments.forget(count)
            segments.forget_covered(part)
            while merged := segments.merge():
                self._moved(segments, merged)
                segments.forget_covered(merged)
        except Exception as error:  # noqa: BLE001  (a thread's boundary: the files still hold every row)
            log.warning("%s: compaction failed and will be tried again: %s", segments.store.url, error)
        finally:
            pa.default_memory_pool().release_unused()  # else this thread keeps what it used until it runs again


def _yield_to_others() -> None:
    """Let this thread run when nobody else wants to: appends and queries go first. Linux counts threads singly."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
