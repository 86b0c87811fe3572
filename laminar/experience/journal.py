"""A local file that only grows: Arrow batches, each with its checksum. What its writer was at last is cut off."""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import pyarrow as pa
import xxhash

__all__ = ["Journal"]

log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<QQ")
"""Before each batch: the bytes of its Arrow message, and their xxh3. After a loss of power a file may have its
length and not its bytes."""


class Journal:
    """One writer; ``sync`` may be called from another thread.

    A batch outlives the process once ``put`` returns, and the machine's power once ``sync`` does. They raise
    OSError; then the journal has ``failed``, and ``begin`` is the only way on.

    Parameters
    ----------
    path
        A local file.
    schema
        Of every batch.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._lock = threading.Lock()
        self.nbytes = self._synced = 0
        self._put_failed = self._sync_failed = False

    @property
    def failed(self) -> bool:
        """Whether it may lack something that it was given."""
        return self._put_failed or self._sync_failed

    def read(self) -> Iterator[pa.RecordBatch]:
        """The batches up to where the writer died; what is cut off is logged."""
        if not self._path.exists():
            return
        data = pa.py_buffer(self._path.read_bytes())
        place = 0
        while place < data.size:
            begin = place + _HEAD.size
            size, check = _HEAD.unpack(data[place:begin]) if begin <= data.size else (0, 0)
            body = data.slice(begin, size) if size and begin + size <= data.size else None
            if body is None or xxhash.xxh3_64_intdigest(body) != check:
                cut = data.size - place
                log.warning("%s is torn at its end (%d bytes): they will be generated again", self._path, cut)
                return
            yield pa.ipc.read_record_batch(body, self._schema)
            place = begin + size

    def begin(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Begin anew with these, in place of all that was there."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("wb", buffering=0)
        try:
            nbytes = sum(_write(file, _framed(batch)) for batch in batches)
            os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError:
            file.close()
            raise
        with self._lock:
            self.close()
            self._file, self.nbytes, self._synced = file, nbytes, nbytes
            self._put_failed = self._sync_failed = False

    def put(self, batch: pa.RecordBatch) -> None:
        """Write one more."""
        self._put_failed = True
        self.nbytes += _write(self._file, _framed(batch))
        self._put_failed = False

    def sync(self) -> None:
        """Put on disk what was written so far."""
        with self._lock:
            nbytes = self.nbytes
            if nbytes == self._synced or self._file.closed:
                return
            descriptor = os.dup(self._file.fileno())
        try:
            os.fsync(descriptor)
        except OSError:
            self._sync_failed = True
            raise
        finally:
            os.close(descriptor)
        self._synced = nbytes

    def close(self) -> None:
        """Close the file; it stays."""
        if hasattr(self, "_file"):
            self._file.close()


def _framed(batch: pa.RecordBatch) -> bytes:
    body = batch.serialize()
    return _HEAD.pack(body.size, xxhash.xxh3_64_intdigest(body)) + bytes(body)


def _write(file: FileIO, data: bytes) -> int:
    written = 0
    while written < len(data):
        written += file.write(data[written:])
    return written
