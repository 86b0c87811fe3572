"""Locks that die with their process: ``flock`` on a descriptor of its own.

A lock belongs to the open file, not to the path or the process. So a descriptor that holds one is never
used to map the file: ``mmap`` keeps a duplicate, and the lock would outlive ``close``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

__all__ = ["EXCLUSIVE", "SHARED", "hold", "holders", "named", "release", "try_lock"]

SHARED = fcntl.LOCK_SH
EXCLUSIVE = fcntl.LOCK_EX

POLL = 0.001
"""Seconds between two tries: ``flock`` has no timeout of its own."""


def try_lock(path: Path | str, how: int) -> int | None:
    """Lock a file that exists, now or not at all. The descriptor goes to ``release``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def release(fd: int) -> None:
    """Give a lock back, also where a forked child still has the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def hold(path: Path, how: int, *, deadline: float) -> int:
    """Lock the file that stands at ``path`` in the end, making it (and its folder) if it is not there.

    Whoever removes a folder holds its lock meanwhile; one who waited for that lock then has one on a file
    that is no more, and tries again.

    Raises
    ------
    TimeoutError
        Another process held it for ``deadline`` seconds; the message names it.
    """
    until = time.monotonic() + deadline
    while True:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed between two of our calls
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(0o600)
            fd = try_lock(path, how)
            if fd is not None and _stands(path, fd):
                return fd
            if fd is not None:
                os.close(fd)
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was held for {deadline:g} s by {named(holders(path))}")
        time.sleep(POLL)


def holders(path: Path) -> list[int]:
    """Ids of the processes that hold a ``flock`` on a file, as far as this process may see them."""
    try:
        file = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    fields = [line.split() for line in lines]
    return sorted({int(f[4]) for f in fields if f[1] == "FLOCK" and f[5] == place})


def named(pids: list[int]) -> str:
    """Processes as a message says them.

    Example
    -------
    >>> named([7]), named([7, 9]), named([])
    ('process 7', 'processes 7, 9', 'another process')
    """
    if not pids:
        return "another process"
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


def _stands(path: Path, fd: int) -> bool:
    """Whether an open file is still the one at ``path``."""
    try:
        at_path, opened = path.stat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)
