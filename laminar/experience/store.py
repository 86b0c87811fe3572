"""A folder under any fsspec URL where a file is either wholly there or not there, and stays once written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import fsspec
import pyarrow as pa
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from laminar.errors import LaminarError, UserError

__all__ = ["Store", "StoreError"]

_PUT_IS_ATOMIC: Final = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "r2"}
"""Object stores: a name shows up once all of it is there. Elsewhere a temporary name is moved into place."""

_TEMPORARY: Final = ".tmp"
_BUFFER_BYTES: Final = 1 << 20
"""Arrow writes a file in many small pieces: they are gathered up to so many bytes; larger ones go as they are."""

ANSWER_SECONDS: float = 60.0
"""After which a remote store is given up on, whatever timeouts its driver has: a driver's may miss a hung request."""
_LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""A large file has longer to be written."""


class StoreError(LaminarError):
    """A store does not do what it is asked for, now: it is full, gone, slow or refuses. Later it may."""


class Store:
    """Files under one URL. Paths are relative to it, with ``/``.

    Parameters
    ----------
    url
        A path or any fsspec URL, e.g. ``runs/one/experience`` or ``s3://bucket/one/experience``.

    Raises
    ------
    UserError
        The URL's protocol is unknown or its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, root = fsspec.core.url_to_fs(self.url, **_options(self.url))
        except (ValueError, ImportError) as error:
            raise UserError(f"cannot use the store {url}: {_reason(error)}") from error
        self._root = str(root).rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)
        protocol = self.fs.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._atomic_put = bool(names & _PUT_IS_ATOMIC)

    def create(self, folders: Iterable[str]) -> None:
        """Make the folders, and write a file to see at once whether the store takes it.

        Raises
        ------
        UserError
            It does not: no permission, no bucket, no space.
        """
        with self._naming("write to", UserError, "give a store that can be written"):
            if not self._atomic_put:  # object stores have no folders, and some drivers would make the bucket
                for folder in folders:
                    self._ask("makedirs", self.path(folder), exist_ok=True)
            self._put("format.json", pa.py_buffer(b'{"format": 1}\n'))

    def path(self, name: str) -> str:
        """The path that the file system knows a file by."""
        return f"{self._root}/{name}"

    def write(self, name: str, data: pa.Buffer) -> None:
        """Write a file, as :meth:`writing` does."""
        with self.writing(name) as sink:
            sink.write(data)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Something to write a file to. When the block ends, the file outlives the process, and on a local disk
        the machine's power.

        Raises
        ------
        StoreError
            The store cannot take it. The file is not there, or is there whole.
        """
        advice = "what was acknowledged is kept; resume when it can be written again"
        with self._naming("write to", StoreError, advice):
            if self.local:
                with _writing_durably(self.path(name)) as sink:
                    yield sink
                return
            buffer = pa.BufferOutputStream()
            yield buffer
            self._put(name, buffer.getvalue())

    def read(self, name: str) -> pa.Buffer:
        """A file's bytes; mapped, not read, where it is local. FileNotFoundError if it is not there."""
        with self._naming("read from", StoreError, "try again when it can be reached", missing_is_known=True):
            if self.local:
                if Path(self.path(name)).stat().st_size == 0:
                    return pa.py_buffer(b"")
                return pa.memory_map(self.path(name)).read_buffer()
            return pa.py_buffer(self._ask("cat_file", self.path(name)))

    def exists(self, name: str) -> bool:
        """Whether a file is there."""
        with self._naming("read from", StoreError, "try again when it can be reached"):
            return bool(self._ask("exists", self.path(name)))

    def names(self, folder: str) -> list[str]:
        """The files in a folder, sorted, without half-written ones. Empty if there is no such folder."""
        return [name for name in self._entries(folder) if not name.endswith(_TEMPORARY)]

    def size(self, name: str) -> int:
        """A file's bytes."""
        with self._naming("read from", StoreError, "try again when it can be reached"):
            return int(self._ask("size", self.path(name)))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those already gone are no error."""
        with self._naming("delete from", StoreError, "nothing is lost; resume when it can be written again"):
            for name in names:
                try:
                    self._ask("rm_file", self.path(name))
                except FileNotFoundError:
                    continue

    def rename(self, name: str, new: str) -> None:
        """Give a file another name in this store."""
        with self._naming("rename in", StoreError, "resume when it can be written again"):
            self._ask("mv", self.path(name), self.path(new))

    def sweep(self, folder: str) -> None:
        """Remove what writers that died left half-written in a folder. For the owner only."""
        self.delete(f"{folder}/{name}" for name in self._entries(folder) if name.endswith(_TEMPORARY))

    def _entries(self, folder: str) -> list[str]:
        with self._naming("list", StoreError, "try again when it can be reached"):
            if self.local:
                try:
                    return sorted(os.listdir(self.path(folder)))  # noqa: PTH208  (one call, no Path objects)
                except FileNotFoundError:
                    return []
            self.fs.invalidate_cache()
            try:
                found = self._ask("ls", self.path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rsplit("/", 1)[-1] for path in found if not path.endswith("/"))

    def _put(self, name: str, data: pa.Buffer) -> None:
        path = self.path(name)
        if self.local:
            with _writing_durably(path) as sink:
                sink.write(data)
        elif self._atomic_put:
            self._ask("pipe_file", path, data.to_pybytes(), extra_seconds=data.size / _LEAST_BYTES_PER_SECOND)
        else:
            self._ask("pipe_file", path + _TEMPORARY, data.to_pybytes())
            self._ask("mv", path + _TEMPORARY, path)

    def _ask(self, method: str, *arguments: Any, extra_seconds: float = 0.0, **options: Any) -> Any:
        """Call the driver; a remote one that does not answer in time is a TimeoutError, and its request is dropped."""
        work = getattr(self.fs, f"_{method}", None) if isinstance(self.fs, AsyncFileSystem) else None
        if work is None:
            return getattr(self.fs, method)(*arguments, **options)
        seconds = ANSWER_SECONDS + extra_seconds
        try:
            return sync(self.fs.loop, work, *arguments, timeout=seconds, **options)
        except FSTimeoutError as error:
            raise TimeoutError(f"no answer within {seconds:.0f} s") from error

    @contextmanager
    def _naming(
        self, doing: str, kind: type[LaminarError], advice: str, *, missing_is_known: bool = False
    ) -> Iterator[None]:
        """Turn whatever a driver raises into one line that names the store and the reason."""
        try:
            yield
        except Exception as error:
            if isinstance(error, LaminarError) or (missing_is_known and isinstance(error, FileNotFoundError)):
                raise
            raise kind(f"cannot {doing} {self.url}: {_reason(error)}; {advice}") from error


@contextmanager
def _writing_durably(path: str) -> Iterator[Any]:
    """A file that is moved to ``path`` once all of it is on disk; then its name is on disk too."""
    temporary = path + _TEMPORARY
    with pa.OSFile(temporary, "wb") as file:
        with pa.BufferedOutputStream(file, _BUFFER_BYTES) as sink:
            yield sink
            sink.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)  # noqa: PTH105  (as often as an append: no Path objects)
    folder = os.open(path.rpartition("/")[0], os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _options(url: str) -> dict[str, Any]:
    """What a driver is told where the user's fsspec configuration says nothing: S3 answers soon or not at all."""
    protocol = fsspec.core.split_protocol(url)[0]
    if protocol not in ("s3", "s3a") or "config_kwargs" in fsspec.config.conf.get(protocol, {}):
        return {}
    return {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 4}}}


def _reason(error: Any) -> str:
    """The first line of what an exception says, without the path where it is an OSError."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
