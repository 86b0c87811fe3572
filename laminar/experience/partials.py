"""What is kept of a running trajectory: its tokens, and where it stands if it has several turns. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

__all__ = ["LINE", "Item", "Partial", "Running", "Turn", "checked", "from_batch", "to_batch"]

LINE: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("run_id", pa.int64()),
        pa.field("version", pa.int64()),
        pa.field("start", pa.int64()),  # or what the line says else: a fence, an end
        pa.field("ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("turn", pa.struct([("number", pa.int32()), ("start", pa.int64()), ("state", pa.binary())])),
    ]
)
"""An item in the journal."""
_STATE_BYTES: Final = 1 << 20
"""Most bytes of one environment state."""
_ENTRY_BYTES: Final = 512
"""About what a trajectory takes beside its tokens."""


class Turn(NamedTuple):
    """Where a multi-turn trajectory stands.

    ``number`` counts its model turns from 1, ``start`` is the position in the response of this turn's first token,
    ``state`` is what the environment needs to go on from there: bytes of its own, e.g. JSON.

    Environments have one turn today, so that replicas send none. It belongs to the one who gives the environment's
    answer to the engine, and goes as the last field of the items that ``laminar_dask.in_engine`` streams.
    """

    number: int
    start: int
    state: bytes


class Item(NamedTuple):
    """Tokens of a response from position ``start`` on, and the turn that it is in now if that is a new one."""

    key: str
    run_id: int
    version: int
    start: int
    ids: Sequence[int]
    logprobs: Sequence[float]
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """A response generated so far, by one weight version: its token ids and their logprobs (natural log), and its
    turn if it has several."""

    version: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    turn: Turn | None = None


@dataclass(slots=True)
class Running:
    """What the pool holds of a trajectory."""

    run_id: int
    version: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    turn: Turn | None = None

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return _ENTRY_BYTES + 8 * len(self.ids) + (len(self.turn.state) if self.turn else 0)

    def write(self, item: Item) -> bool:
        """Put tokens where they belong; False if they do not join on to what is there."""
        joins = item.version == self.version and item.start <= len(self.ids)
        end = item.start + len(item.ids)
        if item.start > 0 and not joins:
            return False
        if item.turn is None and item.start > 0 and self.turn is not None and end < self.turn.start:
            return False
        if not (joins and item.run_id == self.run_id and end <= len(self.ids)):  # else it was sent before
            self.version = item.version
            self.ids[item.start :] = array("i", item.ids)
            self.logprobs[item.start :] = array("f", item.logprobs)
            self.turn = self.turn if item.start > 0 else None
        self.turn = item.turn or self.turn
        return True


def checked(fields: Sequence[Any]) -> Item:
    """The item of these fields.

    Raises
    ------
    ValueError
        They contradict each other, or the environment's state is too large.
    """
    item = Item(*fields)
    item = item._replace(turn=None if item.turn is None else Turn(*item.turn))
    if item.start < 0:
        raise ValueError(f"{item.key}: start is {item.start}")
    if len(item.ids) != len(item.logprobs):
        raise ValueError(f"{item.key}: {len(item.logprobs)} logprobs for {len(item.ids)} ids")
    if item.turn is not None:
        end = item.start + len(item.ids)
        if not 0 <= item.turn.start <= end:
            raise ValueError(f"{item.key}: turn {item.turn.number} begins at {item.turn.start} of {end} tokens")
        if (size := len(item.turn.state)) > _STATE_BYTES:
            state = f"{item.key}: the environment's state has {size} bytes"
            raise ValueError(f"{state}, at most {_STATE_BYTES} are kept: make it smaller")
    return item


def to_batch(lines: Sequence[Item]) -> pa.RecordBatch:
    """Lines of the journal as Arrow."""
    columns = list(zip(*lines, strict=True))
    turns = [None if turn is None else turn._asdict() for turn in columns.pop()]
    arrays = [pa.array(column, kind.type) for column, kind in zip([*columns, turns], LINE, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=LINE)


def from_batch(batch: pa.RecordBatch) -> Iterator[Item]:
    """The inverse of :func:`to_batch`."""
    for line in batch.to_pylist():
        turn = line.pop("turn")
        yield Item(**line, turn=None if turn is None else Turn(**turn))
