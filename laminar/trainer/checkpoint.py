"""Checkpoints on any fsspec URL: seen only when complete, whatever was killed when.

A checkpoint is a folder ``<checkpoints>/step-000020`` in Hugging Face format, with ``optimizer.pt`` and
``trainer.json``. It is complete when ``trainer.json`` is there and readable. On a local disk the whole folder
appears by one rename; elsewhere ``trainer.json`` is uploaded last, and deleted first.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

__all__ = [
    "Checkpoint",
    "as_local",
    "complete",
    "latest",
    "mark_final",
    "prune",
    "read",
    "read_version",
    "step_folder",
    "write",
    "write_version",
]

logger = logging.getLogger(__name__)

_MARKER = "trainer.json"
_VERSION = "version.json"
_PREFIX = "step-"
_LARGE = (".safetensors", ".pt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What ``trainer.json`` says: steps done, the weight version of that moment, the caller's own."""

    url: str
    step: int
    version: int
    extra: dict[str, Any] = field(default_factory=dict)


def step_folder(checkpoints: str, step: int) -> str:
    """URL of the checkpoint of a step.

    Example
    -------
    >>> step_folder("s3://bucket/run/checkpoints", 20)
    's3://bucket/run/checkpoints/step-000020'
    """
    return f"{checkpoints.rstrip('/')}/{_PREFIX}{step:06d}"


def write(url: str, fill: Callable[[Path], None], *, step: int, version: int, extra: dict[str, Any]) -> None:
    """Write a checkpoint; it is seen by ``latest`` at once and as a whole, or not at all.

    Parameters
    ----------
    url
        Folder of the checkpoint. One that is there already is replaced.
    fill
        Writes the files into the (empty, local) folder that it is given.
    """
    filesystem, path = fsspec.core.url_to_fs(url)
    local = Path(path) if _is_local(filesystem) else None
    if local is not None:
        local.parent.mkdir(parents=True, exist_ok=True)
    parent = None if local is None else local.parent
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=parent) as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        fill(folder)
        marker = asdict(Checkpoint(url, step, version, extra))
        (folder / _MARKER).write_text(json.dumps(marker, indent=1))
        if local is not None:
            _sync(folder)
            _swap(folder, local)
        else:
            _upload(filesystem, folder, path)


def read(url: str) -> Checkpoint | None:
    """The checkpoint at a URL; None if there is none or it is not complete."""
    filesystem, path = fsspec.core.url_to_fs(url)
    marker = f"{path}/{_MARKER}"
    try:
        found = json.loads(filesystem.cat_file(marker))
        return Checkpoint(url, int(found["step"]), int(found["version"]), dict(found["extra"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError) as error:
        logger.warning("checkpoint %s is ignored: %s cannot be read (%s)", url, _MARKER, error)
        return None


def complete(checkpoints: str) -> list[Checkpoint]:
    """All complete checkpoints of a run, oldest step first. Half-written ones are not seen."""
    filesystem, path = fsspec.core.url_to_fs(checkpoints)
    filesystem.invalidate_cache()
    if not filesystem.isdir(path):
        return []
    names = [PurePosixPath(name).name for name in filesystem.ls(path, detail=False)]
    found = [read(f"{checkpoints.rstrip('/')}/{name}") for name in names if name.startswith(_PREFIX)]
    return sorted((checkpoint for checkpoint in found if checkpoint), key=lambda found: found.step)


def latest(checkpoints: str) -> Checkpoint | None:
    """The complete checkpoint of the highest step; None if there is none."""
    found = complete(checkpoints)
    return found[-1] if found else None


def prune(checkpoints: str, *, keep: int) -> None:
    """Delete all but the newest ``keep`` complete checkpoints, and what a killed writer left half-written."""
    filesystem, path = fsspec.core.url_to_fs(checkpoints)
    for old in complete(checkpoints)[:-keep]:
        _delete(filesystem, fsspec.core.url_to_fs(old.url)[1])
    if _is_local(filesystem):
        for leftover in Path(path).glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def mark_final(checkpoints: str, checkpoint: str) -> str:
    """Give a complete checkpoint the lasting name ``<checkpoints>/final``; returns that URL.

    Where the file system can, the files are linked, not copied. The checkpoint itself stays as well, so that
    nothing is lost while an older ``final`` is replaced.
    """
    final = f"{checkpoints.rstrip('/')}/final"
    found = read(checkpoint)
    if found is None:
        raise ValueError(f"{checkpoint} is not a complete checkpoint")
    with as_local(checkpoint) as source:

        def fill(folder: Path) -> None:
            for file in source.iterdir():
                if file.name != _MARKER:
                    _link(file, folder / file.name)

        write(final, fill, step=found.step, version=found.version, extra=found.extra)
    return final


@contextmanager
def as_local(url: str, *, weights: bool = True) -> Iterator[Path]:
    """A local folder with the files of a checkpoint (without ``weights``: with the small ones at least), for as long
    as the context is open."""
    filesystem, path = fsspec.core.url_to_fs(url)
    if _is_local(filesystem):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="laminar-checkpoint-") as scratch:
        for file in filesystem.ls(path, detail=False):
            if not weights and PurePosixPath(file).suffix in _LARGE:
                continue
            filesystem.get_file(file, str(Path(scratch) / PurePosixPath(file).name))
        yield Path(scratch)


def write_version(checkpoints: str, version: int) -> None:
    """Remember the newest weight version, before it is published: versions grow, also over restarts."""
    filesystem, path = fsspec.core.url_to_fs(checkpoints)
    content = json.dumps({"version": version}).encode()
    if not _is_local(filesystem):
        filesystem.pipe_file(f"{path}/{_VERSION}", content)
        return
    Path(path).mkdir(parents=True, exist_ok=True)
    scratch = Path(path) / f".{_VERSION}"
    with scratch.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(Path(path) / _VERSION)


def read_version(checkpoints: str) -> int | None:
    """The newest weight version that was ever about to be published; None before the first."""
    filesystem, path = fsspec.core.url_to_fs(checkpoints)
    try:
        return int(json.loads(filesystem.cat_file(f"{path}/{_VERSION}"))["version"])
    except FileNotFoundError:
        return None


def _is_local(filesystem: Any) -> bool:
    return isinstance(filesystem, fsspec.get_filesystem_class("file"))


def _sync(folder: Path) -> None:
    """Bring the files to the disk, so that a rename cannot outlive what it names."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(folder: Path, target: Path) -> None:
    """Move a folder to its place; what was there goes into the scratch folder, to be deleted with it."""
    if target.exists():
        target.rename(folder.parent / "replaced")
    folder.rename(target)


def _upload(filesystem: Any, folder: Path, path: str) -> None:
    if filesystem.isdir(path):
        _delete(filesystem, path)
    files = sorted(folder.iterdir(), key=lambda file: file.name == _MARKER)
    for file in files:
        filesystem.put_file(str(file), f"{path}/{file.name}")


def _delete(filesystem: Any, path: str) -> None:
    """Delete a checkpoint, its marker first: what is half deleted is not complete either."""
    if filesystem.exists(f"{path}/{_MARKER}"):
        filesystem.rm_file(f"{path}/{_MARKER}")
    filesystem.rm(path, recursive=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
