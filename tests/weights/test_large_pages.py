"""Large files of shared memory get large pages where the kernel has any, and small ones where not."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from laminar.weights.pages import HUGE, LARGE, map_file, populate, take_large_pages

SIZE = LARGE + HUGE + 4096
"""Not a whole number of large pages."""


@contextmanager
def shared_file(folder: Path, nbytes: int) -> Iterator[BinaryIO]:
    """An empty file of that size in memory."""
    path = folder / f"laminar-test-pages-{os.getpid()}"
    try:
        with path.open("x+b") as file:
            file.truncate(nbytes)
            yield file
    finally:
        path.unlink(missing_ok=True)


def in_large_pages(file: BinaryIO) -> int:
    """Bytes of this process's maps of a file that are entered as large pages."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            ours = line.endswith(file.name)
        elif ours and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found


def address(view: memoryview) -> int:
    """Where it lies."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_large_file_is_mapped_in_the_large_pages_that_it_was_given() -> None:
    with shared_file(Path("/dev/shm"), SIZE) as file:
        taken = take_large_pages(file, SIZE, time.monotonic() + 60)
        os.posix_fallocate(file.fileno(), 0, SIZE)
        view = map_file(file, SIZE, writable=True)
        assert address(view) % HUGE == 0 and len(view) == SIZE
        populate(view)
        assert taken in (0, SIZE // HUGE * HUGE)  # 0: a kernel before 6.1, or none are left
        assert in_large_pages(file) >= taken
        assert not any(view)  # of zeros, as any new file


def test_what_is_mapped_is_the_file_and_stays_until_nobody_looks() -> None:
    with shared_file(Path("/dev/shm"), SIZE) as file:
        writes, reads = (map_file(file, SIZE, writable=writable) for writable in (True, False))
        writes[SIZE - 3 :] = b"end"
        assert os.pread(file.fileno(), 9, SIZE - 3) == b"end"
        last = reads[SIZE - 3 :]
        assert last == b"end" and last.readonly
        del writes, reads
        gc.collect()
        assert last == b"end"
        assert Path("/proc/self/maps").read_text().count(file.name) == 1
        del last
        gc.collect()
        assert file.name not in Path("/proc/self/maps").read_text()


def test_without_large_pages_a_file_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with shared_file(Path("/dev/shm"), SIZE) as file:
        assert take_large_pages(file, HUGE, time.monotonic() + 60) == 0, "a small file needs none"
        assert take_large_pages(file, SIZE, time.monotonic() - 1) == 0, "the time is over"
        monkeypatch.setattr("laminar.weights.pages._madvise", refused)
        assert take_large_pages(file, SIZE, time.monotonic() + 60) == 0
        view = map_file(file, SIZE, writable=True)
        populate(view)
        assert not any(view)


def test_a_memory_too_small_is_refused_by_who_takes_all_of_it(memory: Callable[[int], Path]) -> None:
    with shared_file(memory(LARGE // 2), LARGE) as file:
        assert take_large_pages(file, LARGE, time.monotonic() + 60) < LARGE
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), 0, LARGE)
