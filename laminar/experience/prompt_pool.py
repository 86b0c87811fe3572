"""Which prompt comes next: every index once an epoch, in an order that the seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from laminar.errors import UserError

__all__ = ["Draw", "PromptPool"]


@dataclass(frozen=True, slots=True)
class Draw:
    """One prompt drawn: its serial number over the whole run, the epoch, and the prompt's index.

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


class PromptPool:
    """Endless draws from ``length`` prompts, shuffled anew each epoch.

    A group that is dropped is not drawn again: the next draw takes its place. The order depends on ``seed``
    and the epoch's number only, so the number of draws is the whole state.

    Example
    -------
    >>> pool = PromptPool(length=3, seed=0)
    >>> draws = pool.take(4)
    >>> sorted(draw.index for draw in draws[:3]), draws[3].epoch, draws[3].group_id
    ([0, 1, 2], 1, 'g000003')
    >>> again = PromptPool(length=3, seed=0)
    >>> again.restore(pool.state())
    >>> again.take(2) == pool.take(2)
    True
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise UserError(f"the environment has {length} prompts, expected at least one")
        self.length, self.seed = length, seed
        self._next = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[Draw]:
        """The next ``count`` draws."""
        draws = [self._draw(number) for number in range(self._next, self._next + count)]
        self._next += count
        return draws

    def state(self) -> dict[str, int]:
        """What ``restore`` needs to go on from here."""
        return {"length": self.length, "seed": self.seed, "draw": self._next}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where a pool of the same length and seed stood.

        Raises
        ------
        UserError
            Length or seed differ: the order would be another one.
        """
        for name, mine in (("length", self.length), ("seed", self.seed)):
            if state[name] != mine:
                raise UserError(
                    f"the run's prompt pool has {name} {state[name]}, this environment's has {mine}: "
                    "resume with the data and the seed that the run began with"
                )
        self._next = state["draw"]

    def _draw(self, number: int) -> Draw:
        epoch, place = divmod(number, self.length)
        if self._order[0] != epoch:
            order = list(range(self.length))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return Draw(number, epoch, self._order[1][place])
