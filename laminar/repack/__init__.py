"""Repack: which replicas are in their long tail, and which of them to empty onto which others. Pure rules.

After Algorithm 1 of arXiv 2510.12633, without its faults: idleness is latched, a destination is never released by
the same plan, loads planned onto it count at once on KV and on batch, it must have room for what its trajectories
will grow to, and a move has to pay: replica seconds saved against the re-prefill, the larger batch and the
hand-over. Versions are never mixed, and only idle replicas receive.
"""

from __future__ import annotations

from laminar.repack.idleness import Idleness
from laminar.repack.loads import NEVER, Load
from laminar.repack.outlook import drain_seconds, hindsight
from laminar.repack.packing import plan
from laminar.repack.plans import Move, Plan, Release, Rules
from laminar.repack.spread import spread

__all__ = [
    "NEVER",
    "Idleness",
    "Load",
    "Move",
    "Plan",
    "Release",
    "Rules",
    "drain_seconds",
    "hindsight",
    "plan",
    "spread",
]
