"""A store that fails on demand: a file system for fsspec whose disk is full when a test says so."""

from __future__ import annotations

import errno
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["Disk", "full_disk"]


class Disk(MemoryFileSystem):
    """Memory that is written like a disk: to a temporary name that is moved. ``room`` is for so many files more."""

    protocol = "disk"
    store: dict[str, Any] = {}  # noqa: RUF012  (fsspec's own way to share files between instances)
    pseudo_dirs = [""]  # noqa: RUF012
    room = sys.maxsize
    url = ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().pipe_file(path, value, mode=mode, **kwargs)


@contextmanager
def full_disk() -> Iterator[Disk]:
    """A file system under a URL of its own; set ``room`` on it."""
    fsspec.register_implementation("disk", Disk, clobber=True)
    disk: Disk = fsspec.filesystem("disk")
    disk.url = f"disk:///{uuid.uuid4().hex}"
    try:
        yield disk
    finally:
        disk.room = sys.maxsize
