"""Large files of shared memory in large pages (2 MiB): a third less work for the kernel when it sends and receives.

What matters is the file's own pages: ``sendfile`` looks each up, and small ones lie scattered. A ``tmpfs`` gives large
ones only where its administrator mounted it so (``huge=``), but since Linux 6.1 a process may ask for them in place
(``MADV_COLLAPSE``, whatever ``shmem_enabled`` says short of ``deny``). Where that fails, small pages do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from typing import BinaryIO

import numpy as np

__all__ = ["map_file", "populate", "take_large_pages"]

logger = logging.getLogger(__name__)

HUGE = 2 << 20
LARGE = 16 * HUGE
"""Files below this keep small pages: nobody could measure the difference."""
STEP = 64 * HUGE
"""Asked for at once; between two steps the time is looked at."""
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
"""From Linux' ``mman.h``; Python has no names for them yet."""
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)  # lets other threads run meanwhile, as ``mmap.madvise`` does not
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(file: BinaryIO, nbytes: int, *, writable: bool) -> memoryview:
    """Map the first bytes of a file; a large one so that its large pages are entered as such. It stays mapped as long
    as the view, or a part of it, is in use. ``OSError`` if it cannot be."""
    if nbytes >= LARGE:
        with contextlib.suppress(OSError):  # no such address space: anywhere, then
            return _map_aligned(file, nbytes, writable=writable)
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return memoryview(mmap.mmap(file.fileno(), nbytes, access=access))


def take_large_pages(file: BinaryIO, nbytes: int, until: float) -> int:
    """Give an empty, writable file of this size large pages, as far as there are any until a time (``monotonic``).

    Returns
    -------
    int
        The bytes from its beginning that have them. The rest has no memory yet.
    """
    if nbytes < LARGE:
        return 0
    taken = 0
    try:
        view = _map_aligned(file, nbytes, writable=True)
        while taken < nbytes // HUGE * HUGE and time.monotonic() < until:
            end = min(taken + STEP, nbytes // HUGE * HUGE)
            for offset in range(taken, end, HUGE):
                os.pwrite(file.fileno(), b"\0", offset)  # a hole has nothing to enlarge
            _madvise(view[taken:end], MADV_COLLAPSE)
            taken = end
    except OSError as error:
        logger.info("%s: %d of %d bytes in large pages (%s)", file.name, taken, nbytes, error.strerror)
    return taken


def populate(view: memoryview) -> None:
    """Enter every page into this process's tables now, so that the first version is not slower than later ones."""
    with contextlib.suppress(OSError):  # before Linux 5.14: each page at its first touch, then
        _madvise(view, MADV_POPULATE_WRITE)


def _map_aligned(file: BinaryIO, nbytes: int, *, writable: bool) -> memoryview:
    """Mapped at a multiple of ``HUGE``, over a part of a larger map that holds the place, and ends both."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    place = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, prot=prot)
    view = memoryview(place)
    skip = -_address(view) % HUGE
    view = view[skip : skip + nbytes]
    address = _address(view)
    if _libc.mmap(address, nbytes, prot, mmap.MAP_SHARED | MAP_FIXED, file.fileno(), 0) != address:
        raise _error()
    return view


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _madvise(view: memoryview, advice: int) -> None:
    while _libc.madvise(_address(view), len(view), advice):
        if ctypes.get_errno() != errno.EINTR:
            raise _error()


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
