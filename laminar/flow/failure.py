"""From whatever ended a run to the one line that its user reads."""

from __future__ import annotations

import traceback

from laminar.errors import LaminarError, RunFailed
from laminar.flow.store import RunFolder

__all__ = ["explain", "known_cause"]


def known_cause(error: BaseException) -> LaminarError | None:
    """The error meant for the user in a chain of causes: what Dask raises may wrap it.

    Example
    -------
    >>> try:
    ...     raise RuntimeError("task failed") from LaminarError("the disk is full")
    ... except RuntimeError as error:
    ...     print(known_cause(error))
    the disk is full
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, LaminarError):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def explain(error: Exception, folder: RunFolder, *, node: str | None = None) -> LaminarError:
    """An error of one line. An unforeseen one goes with its traceback to the run's logs.

    Parameters
    ----------
    node
        The task or stage that failed, where it is known.
    """
    known = known_cause(error)
    if known is not None:
        return known
    try:
        log = folder.write_text("logs/error.log", "".join(traceback.format_exception(error)))
        where = f"its traceback is in {log}"
    except Exception as full:  # noqa: BLE001 - the store may be what went wrong
        where = f"its traceback could not be kept in {folder.url} ({full})"
    text = " ".join(str(error).split())
    what = f"{node} raised {type(error).__name__}" if node else type(error).__name__
    return RunFailed(f"{what}: {text}; {where}")
