"""Which prompt comes next: every index once an epoch, from one or several sources, in an order that can be repeated.

A draw is consumed once its group was trained or evicted, which the experience table knows. So the pool keeps no
cursor of its own on disk: what a resume has to draw again is what the table does not have settled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from laminar.errors import UserError
from laminar.experience.store import Store

__all__ = ["Draw", "PromptPool", "Source", "remember"]

_FILE = "prompts.json"


@dataclass(frozen=True, slots=True)
class Source:
    """One data set among those that prompts are drawn from.

    Parameters
    ----------
    name, fingerprint
        What messages call it, and the hash of its content.
    length
        Number of its prompts: the environment's indices ``offset`` to ``offset + length - 1``.
    weight
        Its share of the draws, relative to the others'.
    priority
        Of each index of the environment; within an epoch higher ones come first. None: all the same.
    """

    name: str
    length: int
    fingerprint: str = ""
    weight: float = 1.0
    offset: int = 0
    priority: Callable[[int], float] | None = None

    @staticmethod
    def of(environment: Any, priority: Callable[[Any], float] | None = None) -> list[Source]:
        """The sources of an environment: those of a mixture, else itself. ``priority`` is of a prompt."""

        def by_index(index: int) -> float:
            assert priority is not None
            return float(priority(environment.prompt(index)))

        found: list[Source] = []
        for part, weight in getattr(environment, "parts", None) or [(environment, 1.0)]:
            offset = sum(source.length for source in found)
            rank = None if priority is None else by_index
            found.append(Source(part.name, len(part), part.fingerprint(), float(weight), offset, rank))
        return found


@dataclass(frozen=True, slots=True)
class Draw:
    """One prompt drawn: its serial number over the whole run, its source's epoch, and its index.

    >>> Draw(draw=16, epoch=0, index=3).group_id
    'g000016'
    """

    draw: int
    epoch: int
    index: int

    @property
    def group_id(self) -> str:
        """Name of the group that this draw becomes. Two draws of one prompt are two groups."""
        return f"g{self.draw:06d}"

    @staticmethod
    def number(group_id: str) -> int:
        """The inverse of ``group_id``.

        >>> Draw.number("g000016")
        16
        """
        return int(group_id[1:])


class PromptPool:
    """Draws from sources, each shuffled anew in each of its epochs; sources take turns by their weights.

    The order depends on the sources, ``seed`` and nothing else. A group that is dropped is not drawn again: the next
    draw takes its place.

    Parameters
    ----------
    sources
        Where prompts come from.
    seed
        Of the order.
    epochs
        How often each source is gone through; None for ever.

    Example
    -------
    >>> pool = PromptPool([Source("sums", length=3)], seed=0)
    >>> draws = pool.take(4)
    >>> sorted(draw.index for draw in draws[:3]), draws[3].epoch, draws[3].group_id
    ([0, 1, 2], 1, 'g000003')
    >>> again = PromptPool([Source("sums", length=3)], seed=0)
    >>> again.consume([0, 2])  # what was settled when the run was left
    >>> [draw.draw for draw in again.take(3)]
    [1, 3, 4]
    >>> once = PromptPool([Source("sums", length=3)], seed=0, epochs=1)
    >>> len(once.take(8)), once.exhausted
    (3, True)
    """

    def __init__(self, sources: Sequence[Source], seed: int, *, epochs: int | None = None) -> None:
        for source in sources:
            if source.length < 1:
                raise UserError(f"the environment `{source.name}` has {source.length} prompts, expected at least one")
            if source.weight <= 0:
                raise UserError(f"the weight of `{source.name}` is {source.weight:g}, expected more than 0")
        self.sources, self.seed, self.epochs = list(sources), seed, epochs
        self._taken = [0] * len(sources)
        self._orders: list[tuple[int, list[int]]] = [(-1, []) for _ in sources]
        self._next = 0
        self._consumed: set[int] = set()

    @property
    def exhausted(self) -> bool:
        """Whether every source was gone through as often as it shall be."""
        return not self._open()

    def take(self, count: int, *, before: int | None = None) -> list[Draw]:
        """The next ``count`` draws that are not consumed; fewer at the end, or where ``before`` is reached."""
        draws: list[Draw] = []
        while len(draws) < count and not self.exhausted and (before is None or self._next < before):
            draw = self._draw()
            if draw.draw not in self._consumed:
                draws.append(draw)
        return draws

    def consume(self, draws: Iterable[int]) -> None:
        """Note draws whose groups are settled; those not taken yet will be left out."""
        self._consumed |= set(draws)

    def identity(self) -> dict[str, Any]:
        """What decides the order, as plain values."""
        names = ("name", "length", "fingerprint", "weight")
        sources = [{name: getattr(source, name) for name in names} for source in self.sources]
        return {"sources": sources, "seed": self.seed}

    def _open(self) -> list[int]:
        limits = [None if self.epochs is None else self.epochs * source.length for source in self.sources]
        return [n for n, limit in enumerate(limits) if limit is None or self._taken[n] < limit]

    def _draw(self) -> Draw:
        """From the source that is furthest behind its share."""
        chosen = min(self._open(), key=lambda n: (self._taken[n] + 1) / self.sources[n].weight)
        source = self.sources[chosen]
        epoch, place = divmod(self._taken[chosen], source.length)
        if self._orders[chosen][0] != epoch:
            self._orders[chosen] = (epoch, self._order(chosen, epoch))
        draw = Draw(self._next, epoch, source.offset + self._orders[chosen][1][place])
        self._taken[chosen] += 1
        self._next += 1
        return draw

    def _order(self, chosen: int, epoch: int) -> list[int]:
        source = self.sources[chosen]
        order = list(range(source.length))
        random.Random(f"{self.seed}/{epoch}/{chosen}").shuffle(order)
        if source.priority is not None:
            rank = source.priority
            order.sort(key=lambda index: -rank(source.offset + index))
        return order


def remember(url: str, pool: PromptPool) -> None:
    """Note what a run draws from, or find that it is what the run began with.

    Raises
    ------
    UserError
        The data, its order or its seed are others: what was drawn before could not be told from what is to come.
    """
    store = Store(f"{url.rstrip('/')}/experience")
    mine = pool.identity()
    if not store.exists(_FILE):
        store.write(_FILE, pa.py_buffer(json.dumps(mine).encode()))
        return
    before = json.loads(store.read(_FILE).to_pybytes())
    if before != mine:
        raise UserError(
            f"the run {url} began with {_said(before)}, now it is {_said(mine)}: resume with the data and the seed "
            "that it began with, or start a new run"
        )


def _said(identity: dict[str, Any]) -> str:
    sources = [
        f"`{one['name']}` ({one['length']} prompts, weight {one['weight']:g}, fingerprint {one['fingerprint'][:12]})"
        for one in identity["sources"]
    ]
    return f"{' and '.join(sources)} at seed {identity['seed']}"
