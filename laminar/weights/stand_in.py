"""Sends a version whose relay has died, out of the memory that it left: for the trainer's own process.

The segment of the trainer's host outlives its relay, so what the trainer published once need not be published
again: the relays that live say what they hold, and get the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from laminar.weights.chain import Plan
from laminar.weights.forward import PROGRESS_DEADLINE, Forwarder, Links, Outgoing, Report
from laminar.weights.prefix import Prefix
from laminar.weights.reader import WeightReader
from laminar.weights.transport import Transport

__all__ = ["StandIn"]


class StandIn:
    """Takes a dead relay's place at the head of a chain.

    Parameters
    ----------
    root
        The segment that the relay left.
    report
        Called from the sending thread; must return at once.
    """

    def __init__(
        self,
        root: Path,
        transport: Transport,
        *,
        run: str,
        token: str = "",
        report: Callable[[Report], None] = lambda report: None,
        progress_deadline: float = PROGRESS_DEADLINE,
    ) -> None:
        self._reader = WeightReader(root)
        self._links = Links(transport, progress_deadline)
        self._run = run
        self._token = token
        self._report = report
        self._forwarder: Forwarder | None = None

    def send(self, plan: Plan) -> None:
        """Feed a plan's chain, as its first member. Returns at once; reports tell the rest.

        Raises
        ------
        LookupError
            The version is not in the segment.
        """
        if self._forwarder is not None:
            self._forwarder.cancel()
        stack = ExitStack()
        pinned = stack.enter_context(self._reader.pin(plan.version))
        whole = Prefix(plan.start, plan.stop, plan.stop)
        self._forwarder = Forwarder(
            self._links,
            Outgoing(plan, 0, self._run, pinned.slot, pinned.digest, whole, token=self._token),
            fed=lambda: True,
            report=self._report,
            sent=lambda nbytes: None,
        )
        self._forwarder.at_end(stack)

    def close(self) -> None:
        """Stop sending and unmap. Idempotent."""
        if self._forwarder is not None:
            self._forwarder.cancel()
            self._forwarder = None
        self._links.close()
        self._reader.close()
