"""The partial-response pool: what every running trajectory has generated so far, so that it can go on elsewhere.

Attempts of one trajectory are told apart by Dask's ``run_id``, which only grows: once a newer attempt has asked
for the prefix, whatever the older one still sends is refused. All that is accepted is also written to a local
journal, so that a restarted data process has it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from laminar.errors import UserError
from laminar.experience.journal import Journal
from laminar.experience.partials import LINE, Item, Partial, Running, checked, from_batch, to_batch
from laminar.experience.store import StoreError

__all__ = ["PartialPool"]

log = logging.getLogger(__name__)

_FENCE: Final = -2
_DROPPED: Final = -1
_REMEMBERED: Final = 65_536
"""Dropped trajectories whose late tokens are still recognised."""
_REWRITE_BYTES: Final = 16 << 20
"""Journal size from which it is rewritten when most of it is about trajectories that are gone."""


class PartialPool:
    """Partial responses by trajectory key.

    Its journal outlives the process at once, and a loss of the machine's power as of the last :meth:`sync`.

    Parameters
    ----------
    path
        The journal, a local file. What it holds is taken up again.
    memory_bytes
        Most bytes of tokens and states to hold. Beyond it no more tokens are taken until trajectories end: what
        is held of each stays a prefix to go on from, the rest would be generated again.

    Attributes
    ----------
    refused
        How many items came from attempts that were superseded or dropped, or did not join on to what is there.
    overflowed
        How many found no room.
    nbytes
        Bytes held.

    Example
    -------
    >>> import tempfile
    >>> pool = PartialPool(Path(tempfile.mkdtemp()) / "partials")
    >>> pool.extend([("g0-0", 1, 7, 0, [5, 6], [-0.5, -0.25])])
    1
    >>> pool.resume("g0-0", 2)
    Partial(version=7, ids=(5, 6), logprobs=(-0.5, -0.25), turn=None)
    >>> pool.extend([("g0-0", 1, 7, 2, [9], [-1.0])])  # the first attempt, late
    0
    >>> pool.extend([("g0-0", 2, 7, 2, [8], [-1.0], (2, 3, b"{}"))]), pool.resume("g0-0", 2).turn
    (1, Turn(number=2, start=3, state=b'{}'))
    """

    def __init__(self, path: Path, *, memory_bytes: int = 1 << 30) -> None:
        self._path, self._memory_bytes = path, memory_bytes
        self._running: dict[str, Running] = {}
        self._dropped: OrderedDict[str, int] = OrderedDict()
        self.refused = self.overflowed = self.nbytes = 0
        self._journal = Journal(path, LINE)
        for batch in self._journal.read():
            for line in from_batch(batch):
                self._accept(line)
        try:
            self._rewrite()
        except OSError as error:
            raise UserError(f"cannot write partial responses to {path}: {error}; give a writable run folder") from error

    def __len__(self) -> int:
        return len(self._running)

    def extend(self, items: Iterable[Sequence[Any]]) -> int:
        """Add tokens that replicas streamed, each as the fields of an ``Item``; the number of items accepted.

        An item joins on where its ``start`` is not beyond what is there, and its version is the same: tokens
        sent twice are there once. An item that starts at 0 begins the response anew. Any other is refused, so
        that no response is ever of two versions or has a hole.
        """
        accepted = []
        for item in [checked(fields) for fields in items]:
            if self.nbytes + 8 * len(item.ids) + (len(item.turn.state) if item.turn else 0) > self._memory_bytes:
                self._overflow()
            elif self._accept(item):
                accepted.append(item)
            else:
                self.refused += 1
        self._write(accepted)
        return len(accepted)

    def resume(self, key: str, run_id: int) -> Partial | None:
        """What a new attempt begins with, None if from nothing. Attempts with a lower ``run_id`` are refused
        from here on; so is this one, and gets None, if a higher one was here before."""
        fence = Item(key, run_id, 0, _FENCE, (), ())
        if not self._accept(fence):
            self.refused += 1
            return None
        self._write([fence])
        running = self._running[key]
        if not running.ids and running.turn is None:
            return None
        return Partial(running.version, tuple(running.ids), tuple(running.logprobs), running.turn)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget trajectories that are finished or given up. Unknown ones are no error."""
        known = [key for key in keys if key in self._running]
        lines = [Item(key, self._running[key].run_id, 0, _DROPPED, (), ()) for key in known]
        for line in lines:
            self._accept(line)
        self._write(lines)

    def sync(self) -> None:
        """Put on disk what was accepted so far; may take long, and may run beside the other methods.

        Raises
        ------
        StoreError
            The disk does not take it. The next item that is accepted begins the journal anew.
        """
        try:
            self._journal.sync()
        except OSError as error:
            raise StoreError(f"cannot write partial responses to {self._path}: {error}") from error

    def close(self) -> None:
        """Close the journal; it stays."""
        self._journal.close()

    def _accept(self, line: Item) -> bool:
        """Change what is in memory; False if the line is refused."""
        key = line.key
        running = self._running.get(key)
        if line.run_id < (running.run_id if running else self._dropped.get(key, -1) + 1):
            return False
        before = running.nbytes if running else 0
        if line.start == _DROPPED:
            self._running.pop(key, None)
            self.nbytes -= before
            self._dropped[key] = line.run_id
            if len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)
            return True
        running = running or Running(line.run_id)
        if line.start != _FENCE and not running.write(line):
            return False
        running.run_id = line.run_id
        self._running[key] = running
        self.nbytes += running.nbytes - before
        return True

    def _overflow(self) -> None:
        if not self.overflowed:
            limit = f"{self._memory_bytes / 1e6:.0f} MB"
            log.warning("partial responses fill their %s: new tokens are not kept until trajectories end", limit)
        self.overflowed += 1

    def _write(self, lines: Sequence[Item]) -> None:
        if not lines:
            return
        try:
            if self._journal.failed or self._journal.nbytes > self._rewrite_at:
                self._rewrite()
            else:
                self._journal.put(to_batch(lines))
        except OSError as error:
            raise StoreError(f"cannot write partial responses to {self._path}: {error}") from error

    def _rewrite(self) -> None:
        """Begin a new journal with what is there now."""
        self._journal.begin(map(to_batch, filter(None, [list(self._ended()), *([line] for line in self._held())])))
        self._rewrite_at = max(_REWRITE_BYTES, 2 * self._journal.nbytes)

    def _ended(self) -> Iterator[Item]:
        for key, run_id in self._dropped.items():
            yield Item(key, run_id, 0, _DROPPED, (), ())

    def _held(self) -> Iterator[Item]:
        for key, at in self._running.items():
            yield Item(key, at.run_id, at.version, 0, at.ids, at.logprobs, at.turn)
