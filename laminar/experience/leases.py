"""Who holds which groups, until when. In memory only: leases die with the table's owner."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Held", "Leases"]


@dataclass(frozen=True, slots=True)
class Held:
    """One lease; ``until`` on the clock of ``Leases``, None for ever."""

    lessee: str
    groups: tuple[str, ...]
    until: float | None


class Leases:
    """The leases that run, and how others ended.

    Example
    -------
    >>> now = 0.0
    >>> leases = Leases(lambda: now)
    >>> name = leases.hold("trainer", ["g0"], seconds=10.0)
    >>> leases.overdue(), leases.of("trainer") == [name]
    ([], True)
    >>> now = 10.0
    >>> leases.end(leases.overdue()[0], "expired").groups, leases.how(name), leases.how("x")
    (('g0',), 'expired', 'unknown')
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, Held] = {}
        self._ended: dict[str, str] = {}

    def hold(self, lessee: str, groups: list[str], *, seconds: float | None) -> str:
        """Begin a lease; its id."""
        name = f"{lessee}-{uuid.uuid4().hex[:12]}"
        until = None if seconds is None else self._clock() + seconds
        self._held[name] = Held(lessee, tuple(groups), until)
        return name

    def get(self, name: str) -> Held | None:
        """A lease that runs."""
        return self._held.get(name)

    def of(self, lessee: str) -> list[str]:
        """The leases that somebody holds."""
        return [name for name, held in self._held.items() if held.lessee == lessee]

    def overdue(self) -> list[str]:
        """Leases whose time is up."""
        now = self._clock()
        return [name for name, held in self._held.items() if held.until is not None and held.until <= now]

    def end(self, name: str, how: str) -> Held:
        """End a lease: ``committed``, ``released`` or ``expired``."""
        self._ended[name] = how
        return self._held.pop(name)

    def how(self, name: str) -> str:
        """How a lease ended; ``unknown`` if nobody here gave it."""
        return self._ended.get(name, "unknown")

    def note(self, name: str, how: str) -> None:
        """Note how a lease ended that was given by an earlier owner."""
        self._ended[name] = how
