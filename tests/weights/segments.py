"""Versions published one after the other, as a trainer and its relay do it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher

__all__ = ["publisher_of"]


def publisher_of(tensors: Callable[[int], dict[str, torch.Tensor]]) -> Callable[..., None]:
    """A function ``(owner, *versions)`` that publishes what ``tensors`` gives for each version."""

    def publish(owner: SegmentOwner, *versions: int) -> None:
        publisher = Publisher(owner.root)
        for version in versions:
            publisher.publish(version, tensors(version))
            owner.promote(version)

    return publish
