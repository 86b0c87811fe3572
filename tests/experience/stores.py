"""Stores that fail on demand: one whose disk is full when a test says so, one under which the process dies."""

from __future__ import annotations

import errno
import os
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["AtOnce", "Died", "Disk", "Mortal", "full_disk", "mortal_disk"]


class Disk(MemoryFileSystem):
    """Memory that is written like a disk: to a temporary name that is moved. ``room`` is for so many files more,
    ``refuses`` the error that every write gets."""

    protocol = "disk"
    store: dict[str, Any] = {}  # noqa: RUF012  (fsspec's own way to share files between instances)
    pseudo_dirs = [""]  # noqa: RUF012
    room = sys.maxsize
    refuses = 0
    url = ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        Disk.room -= 1
        reason = self.refuses or (errno.ENOSPC if self.room < 0 else 0)
        if reason:
            raise OSError(reason, os.strerror(reason), path)
        super().pipe_file(path, value, mode=mode, **kwargs)


class Died(BaseException):
    """The process is no more. No ``except Exception`` keeps it alive."""


class Mortal(MemoryFileSystem):
    """A disk under which the process dies before, in the middle of or after its ``left``-th change."""

    protocol = "mortal"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    left = sys.maxsize
    moment = "before"
    url = ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._may_die("before")
        whole = value if self.left or self.moment != "within" else value[: len(value) // 2]
        super().pipe_file(path, whole, mode=mode, **kwargs)
        self._may_die("within", "after")

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._may_die("before", "within")
        super().mv(path1, path2, **kwargs)
        self._may_die("after")

    def rm_file(self, path: str) -> None:
        self._may_die("before", "within")
        super().rm_file(path)
        self._may_die("after")

    def _may_die(self, *moments: str) -> None:
        if "before" in moments:
            self.left -= 1
        if self.left == 0 and self.moment in moments:
            raise Died


class AtOnce(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def full_disk() -> Iterator[type[Disk]]:
    """A file system under a URL of its own; set ``room`` on it, for every thread."""
    fsspec.register_implementation("disk", Disk, clobber=True)
    Disk.url = f"disk:///{uuid.uuid4().hex}"
    try:
        yield Disk
    finally:
        Disk.room, Disk.refuses = sys.maxsize, 0


def mortal_disk() -> Mortal:
    """A file system under a URL of its own; set ``left`` and ``moment`` on it."""
    fsspec.register_implementation("mortal", Mortal, clobber=True)
    disk: Mortal = fsspec.filesystem("mortal")
    disk.url = f"mortal:///{uuid.uuid4().hex}"
    disk.left = sys.maxsize
    return disk
