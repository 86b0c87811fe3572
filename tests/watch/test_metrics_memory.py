"""Metrics are flushed from whatever thread is free: none of them keeps memory for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FLUSHES = """
import math, sys
from concurrent.futures import ThreadPoolExecutor
import psutil
from laminar.watch.metrics import MetricsWriter

metrics = MetricsWriter(sys.argv[1], every_rows=sys.maxsize, every_seconds=math.inf)
threads = [ThreadPoolExecutor(1) for _ in range(int(sys.argv[2]) + 1)]
sizes = []
for thread in threads:
    for step in range(10):
        metrics.write("steps", {f"figure_{number}": 0.5 for number in range(25)})
    thread.submit(metrics.flush).result(60)
    sizes.append(psutil.Process().memory_info().rss)
print(sizes[-1] - sizes[0])
"""


def test_threads_that_flush_metrics_keep_no_memory(tmp_path: Path) -> None:
    threads = 8
    command = [sys.executable, "-c", FLUSHES, str(tmp_path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < threads << 20, "Arrow's memory that a thread has used stays with it: 2 MB each"
