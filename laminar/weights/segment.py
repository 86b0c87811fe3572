"""The files that hold a host's weight versions, and what every side of them agrees on.

One folder in ``/dev/shm`` a run::

    owner.lock   the relay holds it while it lives: one owner a folder
    users.lock   trainer and replicas hold it, shared, while they live; with both free the folder is dead
    layout.json  where each tensor lies; written last, so a folder without it was never finished
    head         one page; word 1 says which version in which slot is the newest
    slot0..2     a page or more of header (stamp, digest, hash of each chunk), then the flat buffer

A version is *staged* by the trainer's process into a slot that nobody reads, *promoted* by the relay once
every hash matches, and then never changes until its slot is recycled. Who reads a slot holds a shared
``flock`` on it, who fills it an exclusive one. The kernel drops both when a process dies, so nothing is
ever stuck, and the files stay, so a restarted relay takes up what was there.

Version and slot stand in one aligned eight-byte word: a process that dies between two stores leaves either
the old word or the new. (Order between a store here and a load elsewhere rests on x86 and on the system
calls between.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path

from laminar.errors import LaminarError
from laminar.weights.layout import Layout
from laminar.weights.locks import EXCLUSIVE, release, try_lock
from laminar.weights.pages import take_large_pages

__all__ = [
    "clear",
    "create",
    "host_label",
    "in_use",
    "pack_word",
    "remove_segments",
    "segment_root",
    "slot_bytes",
    "sweep",
    "unpack_word",
]

PREFIX = "laminar-"
SCRATCH_LOCK = "scratch.lock"
"""In a folder that is no run's (``scratch``): its process holds it while it lives."""
MAGIC = int.from_bytes(b"LAMINAR1", "little")
PAGE = 4096
LARGE_PAGES_DEADLINE = 30.0
"""Seconds for a segment's large pages, where memory must first be put in order; the rest has small ones."""
STAGED, PUBLISHED, PARTIAL = 1, 2, 3
"""What a slot holds: a version nobody may read yet, one that can be read, one part of a version (``shards``)."""
# Words of the head page, and of a slot's header. A stamp of 0: nothing in the slot may be read.
HEAD_WORD, HEAD_SLOTS, HEAD_LAYOUT = 1, 2, 3
SLOT_STAMP, SLOT_LAYOUT, SLOT_DIGEST, SLOT_HASHES = 1, 2, 3, 8


def host_label() -> str:
    """Tells hosts apart that share one ``/dev/shm`` (emulated ones): the variable ``LAMINAR_HOST``; else empty."""
    return os.environ.get("LAMINAR_HOST", "")


def segment_root(run: str, label: str | None = None) -> Path:
    """The folder of a run's weights on this host, or on the emulated host ``label``."""
    label = host_label() if label is None else label
    return Path("/dev/shm") / (f"{PREFIX}{run}@{label}" if label else f"{PREFIX}{run}")


def pack_word(version: int, tag: int) -> int:
    """A version and a small positive tag in one word; 0 is no word, so version 0 is one.

    Example
    -------
    >>> unpack_word(pack_word(0, 1)), unpack_word(pack_word(7, 3))
    ((0, 1), (7, 3))
    """
    if not (0 <= version < 1 << 55 and 0 < tag < 256):
        raise ValueError(f"version {version}, tag {tag}: out of range")
    return version << 8 | tag


def unpack_word(word: int) -> tuple[int, int]:
    """The inverse of ``pack_word``."""
    return word >> 8, word & 255


def header_bytes(layout: Layout) -> int:
    """Bytes before the flat buffer in a slot: whole pages."""
    return -(-(SLOT_HASHES + layout.chunks) * 8 // PAGE) * PAGE


def slot_bytes(layout: Layout) -> int:
    """Size of a slot's file."""
    return header_bytes(layout) + layout.nbytes


def create(root: Path, layout: Layout, slots: int) -> None:
    """Make the files of an empty segment. All memory is taken now, so that no later copy can run out of it.

    Raises
    ------
    LaminarError
        There is not enough free memory; says how many bytes are needed and how many are free.
    """
    needed = PAGE + slots * slot_bytes(layout)
    stats = os.statvfs(root)
    free = stats.f_bavail * stats.f_frsize
    no_space = LaminarError(
        f"{root}: {slots} slots of the weights need {needed:,} bytes, {free:,} are free: "
        f"free shared memory, raise the limit of {root.parent}, or take fewer slots"
    )
    if needed > free:
        raise no_space
    layout_hash = int(layout.hash, 16)
    until = time.monotonic() + LARGE_PAGES_DEADLINE
    try:
        for index in range(slots):
            _new_file(root / f"slot{index}", slot_bytes(layout), {SLOT_LAYOUT: layout_hash}, until)
        _new_file(root / "head", PAGE, {HEAD_SLOTS: slots, HEAD_LAYOUT: layout_hash}, until)
    except OSError as error:
        clear(root)
        if error.errno == errno.ENOSPC:
            raise no_space from error
        raise
    half = root / "layout.json.half"
    half.write_text(layout.to_json())
    half.rename(root / "layout.json")


def clear(root: Path) -> None:
    """Remove a segment's files but keep its locks. The layout goes first: without it there is no segment."""
    for path in [root / "layout.json", *root.iterdir()]:
        if path.suffix != ".lock":
            path.unlink(missing_ok=True)


def remove_segments(root: Path) -> None:
    """Remove a folder whoever holds it; whoever has it mapped keeps what is mapped. Fine if there is none."""
    try:
        clear(root)
        for lock in ("users.lock", "owner.lock"):
            (root / lock).unlink(missing_ok=True)
        root.rmdir()
    except FileNotFoundError:
        return  # gone already
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        # The next owner of the same run, who waited for the lock, has moved in.


def in_use(root: Path) -> bool:
    """Whether a living relay owns the folder: another run of the same id on this host."""
    try:
        fd = try_lock(root / "owner.lock", EXCLUSIVE)
    except FileNotFoundError:
        return False
    if fd is None:
        return True
    release(fd)
    return False


def sweep(folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove what runs killed outright left behind, and return the names of their folders.

    A folder is dead when nobody is attached to it: no relay, no trainer, no replica. A run whose relay is
    just being restarted still has the others, and is left alone, as are other users' folders.
    """
    gone = []
    for root in sorted(folder.glob(f"{PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # its owner removed it meanwhile
            if root.is_dir() and root.stat().st_uid == os.getuid() and _remove_if_dead(root):
                gone.append(root.name)
    return gone


def _remove_if_dead(root: Path) -> bool:
    with contextlib.ExitStack() as locks:
        if (root / SCRATCH_LOCK).exists():
            fd = try_lock(root / SCRATCH_LOCK, EXCLUSIVE)
            if fd is None:
                return False
            locks.callback(release, fd)
            if any(in_use(inside) for inside in root.glob(f"{PREFIX}*")):
                return False  # a relay that the dead process started
            shutil.rmtree(root, ignore_errors=True)
            return True
        for name in ("users.lock", "owner.lock"):
            if not (root / name).exists():
                continue  # killed in the middle of making or removing the folder
            fd = try_lock(root / name, EXCLUSIVE)
            if fd is None:
                return False
            locks.callback(release, fd)
        if not (root / "owner.lock").exists() and any(root.iterdir()):
            return False  # nothing of ours, or an owner is just moving in
        remove_segments(root)
        return True


def _new_file(path: Path, nbytes: int, words: dict[int, int], until: float) -> None:
    """A new file of zeros with its memory taken, and some words of its header set."""
    with path.open("x+b") as file:
        file.truncate(nbytes)
        take_large_pages(file, nbytes, until)
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for index, value in {0: MAGIC, **words}.items():
            os.pwrite(file.fileno(), value.to_bytes(8, "little"), index * 8)
