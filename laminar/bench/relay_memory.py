"""Handing a version over and taking it, on one host; and what memory can do there at best."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from laminar.weights.layout import Layout
from laminar.weights.scratch import scratch

__all__ = ["fits", "measure_handing_over", "plain_copy"]


def measure_handing_over(nbytes: int, repeats: int) -> dict[str, Any]:
    """``publish_ratio``, ``pull_us`` and ``pull_copies``."""
    import torch

    from laminar.weights.owner import SegmentOwner
    from laminar.weights.publisher import Publisher
    from laminar.weights.reader import WeightReader

    nbytes = fits(nbytes, 6)
    tensors = {f"layer.{index}": torch.ones(nbytes // 64, dtype=torch.int32) for index in range(16)}
    with _folder() as base:
        copy_once = _copier([tensor.numpy() for tensor in tensors.values()], _shared(base / "plain", nbytes))
        owner = SegmentOwner(base / "laminar-publish")
        owner.prepare(Layout.of(tensors))
        publisher, reader = Publisher(owner.root), WeightReader(owner.root)
        stalls, copies, pulls, copied = [], [], [], 0
        try:
            for version in range(3 + repeats):
                copies.append(_seconds(copy_once))
                stalls.append(publisher.publish(version, tensors).seconds)
                owner.promote(version)
                began = time.perf_counter()
                with reader.pull(verify=False) as pulled:
                    pulls.append(time.perf_counter() - began)
                    with reader.pin(version) as pinned:
                        copied += _copies(pulled.tensors, pinned.slot.payload)
        finally:
            publisher.close()
            reader.close()
            owner.close()
    copy = median(copies[3:])
    return {
        "publish_ratio": median(stalls[3:]) / copy,
        "publish_seconds": median(stalls[3:]),
        "copy_seconds": copy,
        "publish_bytes": nbytes,
        "pull_us": median(pulls[3:]) * 1e6,
        "pull_first_us": median(pulls[:3]) * 1e6,
        "pull_copies": copied,
    }


@contextmanager
def plain_copy(nbytes: int) -> Iterator[Callable[[], float]]:
    """A plain copy from warm shared memory into warm shared memory, by two threads: each call says its bytes/s."""
    with _folder() as base:
        source, target = _shared(base / "source", nbytes), _shared(base / "target", nbytes)
        copy = _copier([source[: nbytes // 2], source[nbytes // 2 :]], target)
        yield lambda: nbytes / _seconds(copy)


def fits(nbytes: int, buffers: int) -> int:
    """At most ``nbytes``, and no more than so many buffers find room for in most of what is free."""
    stats = os.statvfs("/dev/shm")
    with open("/proc/meminfo") as file:
        memory = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    room = min(stats.f_bavail * stats.f_frsize, memory) * 9 // 10
    return min(nbytes, room // buffers) >> 20 << 20


def _copies(tensors: dict[str, Any], payload: memoryview) -> int:
    """How many tensors do not lie in the segment itself."""
    import numpy as np

    start = int(np.frombuffer(payload, np.uint8).ctypes.data)
    return sum(not start <= tensor.data_ptr() < start + len(payload) for tensor in tensors.values())


def _copier(pieces: Sequence[Any], target: Any) -> Callable[[], None]:
    """A plain copy of arrays, one after the other, into a buffer: half of them by a second thread."""
    import numpy as np

    sources = [piece.reshape(-1).view(np.uint8) for piece in pieces]
    ends = list(itertools.accumulate(source.size for source in sources))
    copies = [(target[end - source.size : end], source) for end, source in zip(ends, sources, strict=True)]

    def some(part: Sequence[tuple[Any, Any]]) -> None:
        for into, source in part:
            np.copyto(into, source)

    def copy() -> None:
        other = threading.Thread(target=some, args=(copies[len(copies) // 2 :],))
        other.start()
        some(copies[: len(copies) // 2])
        other.join()

    return copy


def _shared(path: Path, nbytes: int) -> Any:
    """Warm shared memory."""
    import numpy as np

    with path.open("w+b") as file:
        file.truncate(nbytes)
        memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    memory[:] = 1
    return memory


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def _folder() -> Iterator[Path]:
    with scratch("bench-memory") as folder:
        yield folder
