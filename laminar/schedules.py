"""When more work may be handed out: the admission rules of the schedules, pure.

The paper's schedule is trajectory-level asynchrony: replicas take work whenever they are empty and the trainer
takes groups whenever enough are complete. A staleness ceiling turns the same program into a bounded one, and a
ceiling of 0 into synchronous on-policy training. All counts are trajectories.
"""

from __future__ import annotations

from laminar.trajectory import Version

__all__ = ["backlog_limit", "groups_to_admit", "lowest_version"]

ASYNCHRONOUS_BATCHES = 2
"""Batches that may be under way when no ceiling is set: one being trained on, one being generated."""


def backlog_limit(*, batch_size: int, staleness_ceiling: int | None) -> int:
    """Most trajectories that may be running, waiting or leased at once.

    With a ceiling of c, a trajectory admitted now is trained at most c updates later if no more than
    ``(c + 1) * batch_size`` are under way (AReaL's admission gate, arXiv 2505.24298, counted in trajectories).

    >>> backlog_limit(batch_size=128, staleness_ceiling=0)
    128
    >>> backlog_limit(batch_size=128, staleness_ceiling=None)
    256
    """
    batches = ASYNCHRONOUS_BATCHES if staleness_ceiling is None else staleness_ceiling + 1
    return batches * batch_size


def lowest_version(version: Version, *, staleness_ceiling: int | None) -> Version:
    """Lowest weight version that may generate a trajectory admitted while the trainer is at ``version``.

    >>> lowest_version(7, staleness_ceiling=2), lowest_version(1, staleness_ceiling=2)
    (5, 0)
    >>> lowest_version(7, staleness_ceiling=None)
    0
    """
    return 0 if staleness_ceiling is None else max(0, version - staleness_ceiling)


def groups_to_admit(outstanding: int, *, limit: int, batch_size: int, group_size: int, feed: int) -> int:
    """How many groups an empty replica gets now.

    A whole feed where there is room for one; less only if the trainer would otherwise never see a full
    batch (groups were evicted), else nothing: small feeds waste a replica.

    Parameters
    ----------
    outstanding
        Trajectories running, ready or leased, not yet trained on or evicted.
    limit
        ``backlog_limit``.
    feed
        Groups that a replica takes at once.

    Example
    -------
    >>> rule = dict(limit=128, batch_size=128, group_size=8, feed=8)
    >>> groups_to_admit(0, **rule), groups_to_admit(64, **rule), groups_to_admit(128, **rule)
    (8, 8, 0)
    >>> groups_to_admit(120, **rule)  # one group was evicted: without it no batch fills
    1
    """
    room = max(0, limit - outstanding) // group_size
    if room >= feed:
        return feed
    return room if outstanding < batch_size else 0
