"""Which run this is and where its files lie: what every stage and task is told."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from laminar.errors import UserError

__all__ = ["RunContext", "new_run_id"]

_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without those that are read as one another."""


@dataclass(frozen=True)
class RunContext:
    """One run.

    Parameters
    ----------
    run_id
        Unique, and in order of time.
    store
        URL (fsspec) of the run store.
    url
        ``<store>/<flow>/<run id>``: the run's folder.

    Example
    -------
    >>> RunContext.of("s3://lab/runs", "quickstart", "20301130-0712-k3f9").url
    's3://lab/runs/quickstart/20301130-0712-k3f9'
    """

    run_id: str
    store: str
    url: str

    @classmethod
    def of(cls, store: str, flow: str, run_id: str) -> RunContext:
        """The context of a run of ``flow`` in ``store``.

        Raises
        ------
        UserError
            The run id cannot be the name of a folder.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", run_id):
            raise UserError(f"run id {run_id!r}: expected up to 64 letters, digits, '-', '_' and '.'")
        return cls(run_id=run_id, store=store, url=f"{store}/{flow}/{run_id}")


def new_run_id(now: datetime | None = None) -> str:
    """Minute (UTC) and four random letters: short, sortable, unique.

    Example
    -------
    >>> new_run_id(datetime(2030, 11, 30, 7, 12, tzinfo=UTC))[:14]
    '20301130-0712-'
    """
    now = now or datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M}-{''.join(secrets.choice(_LETTERS) for _ in range(4))}"
