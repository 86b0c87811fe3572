"""How many tokens a running trajectory still needs: conditional on what it has, learnt from those that finished.

Trajectories that still run count too, as what they are: samples known to be longer than they are now (the
Kaplan-Meier estimator). Without that the first to finish, which are the short ones, would say that all are short.
Finished siblings shift the estimate of their group as much as groups were seen to differ. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["Lengths", "PromptLengths", "Survival"]

Numbers = npt.NDArray[np.float64]

BINS = 512
"""Resolution: the cap is divided into so many bins."""
WINDOW = 4096
"""Finished trajectories that are remembered: recent steps, not the whole run."""
GROUPS = 512
"""Complete groups that say how much groups differ."""
NEWS = 20
"""How much they differ is worked out anew once a twentieth of them are new."""


@dataclass(frozen=True)
class Survival:
    """Share of trajectories longer than ``k * width`` tokens, k = 0 … BINS; 1 at 0 and 0 at the cap."""

    width: float
    share: Numbers

    @cached_property
    def _area(self) -> Numbers:
        """Tokens still to come, times the share: the integral of ``share`` from each bin to the cap."""
        steps = (self.share[:-1] + self.share[1:]) / 2 * self.width
        return np.append(np.cumsum(steps[::-1])[::-1], 0.0)

    def at(self, tokens: Numbers) -> Numbers:
        """Share longer than ``tokens``."""
        position = np.clip(tokens / self.width, 0.0, len(self.share) - 1.0)
        low = position.astype(np.int64)
        high = np.minimum(low + 1, len(self.share) - 1)
        part = position - low
        return self.share[low] * (1.0 - part) + self.share[high] * part

    def remaining(self, generated: Numbers, factor: Numbers | float = 1.0) -> Numbers:
        """Expected tokens still to come, given ``generated``; ``factor`` as in ``Lengths.factors``.

        >>> half = Survival(width=1.0, share=np.array([1.0, 1.0, 0.5, 0.0]))
        >>> [float(x) for x in half.remaining(np.array([0.0, 2.0]))]
        [2.0, 0.5]
        """
        base = np.asarray(generated, dtype=np.float64) / factor
        cells = np.arange(len(self.share), dtype=np.float64)
        area = np.interp(base / self.width, cells, self._area)
        return np.asarray(area / np.maximum(self.at(base), 1e-12) * factor, dtype=np.float64)

    def quantile(self, level: float, generated: Numbers, factor: Numbers | float = 1.0) -> Numbers:
        """Tokens still to come that are not exceeded with probability ``level``, given ``generated``."""
        base = np.asarray(generated, dtype=np.float64) / factor
        target = (1.0 - level) * self.at(base)
        cells = np.arange(len(self.share), dtype=np.float64) * self.width
        ends = np.interp(-target, -self.share, cells)
        return np.asarray(np.maximum(0.0, ends - base) * factor, dtype=np.float64)


class PromptLengths:
    """How long the answers to each prompt were: what is likely long is started first, so that it does not end last.

    Example
    -------
    >>> seen = PromptLengths()
    >>> for prompt, tokens in [("easy", 10), ("hard", 900), ("hard", 700)]:
    ...     seen.add(prompt, tokens)
    >>> sorted(["easy", "new", "hard"], key=seen.expected, reverse=True)
    ['hard', 'new', 'easy']
    """

    def __init__(self) -> None:
        self._mean: OrderedDict[str, float] = OrderedDict()
        self._overall = 0.0

    def add(self, prompt: str, tokens: int) -> None:
        """An answer to ``prompt`` was so long."""
        before = self._mean.pop(prompt, float(tokens))
        self._mean[prompt] = before + (tokens - before) / 2
        self._overall += (tokens - self._overall) / min(WINDOW, len(self._mean) + 1)
        if len(self._mean) > 16 * WINDOW:
            self._mean.popitem(last=False)

    def expected(self, prompt: str) -> float:
        """Tokens; of a prompt never seen, the mean of all."""
        return self._mean.get(prompt, self._overall)


class Lengths:
    """Learns from finished trajectories; sizes in tokens of the response.

    Parameters
    ----------
    cap
        Longest response (``max_new_tokens``): what is assumed until there is data.

    Example
    -------
    >>> lengths = Lengths(cap=1000)
    >>> bool(lengths.survival().remaining(np.array([0.0]))[0] > 990)
    True
    >>> for i in range(500):
    ...     lengths.finished(f"g{i}", 100 + i % 100)
    >>> 45 < float(lengths.survival().remaining(np.array([110.0]))[0]) < 55
    True
    """

    def __init__(self, cap: int) -> None:
        self.cap = max(1, cap)
        self._finished: deque[float] = deque(maxlen=WINDOW)
        self._open: dict[str, list[float]] = {}
        self._complete: deque[list[float]] = deque(maxlen=GROUPS)
        self._likeness = 0.0
        self._unseen = 0
        """Complete groups since ``_likeness`` was worked out."""

    def __len__(self) -> int:
        return len(self._finished)

    def finished(self, group: str, length: int, *, group_size: int = 1) -> None:
        """One trajectory is whole."""
        size = float(min(max(1, length), self.cap))
        self._finished.append(size)
        if group_size < 2:
            return
        siblings = self._open.setdefault(group, [])
        siblings.append(size)
        if len(siblings) >= group_size:
            self._complete.append(self._open.pop(group))
            self._unseen += 1
        while len(self._open) > 4 * GROUPS:  # groups that were given up
            del self._open[next(iter(self._open))]

    def survival(self, running: Sequence[float] | Numbers = ()) -> Survival:
        """The estimate now. ``running``: tokens that unfinished trajectories have, already divided by their
        factor. One more that never finished is always assumed, so that nothing is ever known for certain."""
        width = self.cap / BINS
        edges = np.arange(BINS + 1) * width
        ended, _ = np.histogram(np.array(self._finished, dtype=np.float64), edges)
        censored, _ = np.histogram(np.minimum(np.asarray(running, dtype=np.float64), self.cap), edges)
        leaving = (ended + censored).astype(np.float64)
        leaving[-1] += 1.0
        at_risk = np.cumsum(leaving[::-1])[::-1] - censored / 2
        share = np.append(1.0, np.cumprod(1.0 - ended / np.maximum(at_risk, 1.0)))
        share[-1] = 0.0
        return Survival(width, share)

    def factors(self, groups: Sequence[str], sizes: Sequence[int] | int) -> Numbers:
        """How much longer than usual each group is thought to be, from its finished siblings; 1 without any.

        The first k of n siblings to finish are its shortest: they are held against the k lowest of n normal
        scores, and the difference is shrunk by how alike siblings were in complete groups.
        """
        if not self._open or self.likeness() <= 0.0:
            return np.ones(len(groups))
        mean, spread = self._moments()
        known: dict[str, float] = {}
        of_one = [sizes] * len(groups) if isinstance(sizes, int) else sizes
        for group, size in zip(groups, of_one, strict=True):
            if group not in known:
                known[group] = self._factor(self._open.get(group, []), size, mean, spread)
        return np.array([known[group] for group in groups])

    def likeness(self) -> float:
        """Share of the variance of log lengths that lies between groups, 0 to 1 (intraclass correlation)."""
        if self._unseen > len(self._complete) // NEWS:
            self._likeness, self._unseen = _intraclass([np.log(group) for group in self._complete]), 0
        return self._likeness

    def _moments(self) -> tuple[float, float]:
        logs = np.log(np.array(self._finished))
        return float(logs.mean()), float(max(1e-6, logs.std()))

    def _factor(self, siblings: list[float], size: int, mean: float, spread: float) -> float:
        count = len(siblings)
        if not count:
            return 1.0
        total = max(size, count)
        expected = sum(_score(rank, total) for rank in range(1, count + 1)) / count
        seen = sum((math.log(length) - mean) / spread for length in siblings) / count
        alike = self.likeness()
        shrink = count * alike / (1.0 + (count - 1) * alike)
        return float(min(4.0, max(0.25, math.exp(shrink * spread * (seen - math.sqrt(1.0 - alike) * expected)))))


def _score(rank: int, total: int) -> float:
    """Expected value of the ``rank``-th smallest of ``total`` standard normal draws (Blom's approximation)."""
    return NormalDist().inv_cdf((rank - 0.375) / (total + 0.25))


def _intraclass(groups: Sequence[Numbers]) -> float:
    """One-way analysis of variance.

    >>> _intraclass([np.array([1.0, 1.1]), np.array([3.0, 3.1]), np.array([5.0, 5.1])]) > 0.9
    True
    """
    if len(groups) < 3:
        return 0.0
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    total = sizes.sum()
    means = np.array([group.mean() for group in groups])
    grand = float((sizes * means).sum() / total)
    between = float((sizes * (means - grand) ** 2).sum() / (len(groups) - 1))
    within = float(sum(((group - group.mean()) ** 2).sum() for group in groups) / max(1.0, total - len(groups)))
    typical = (total - (sizes**2).sum() / total) / (len(groups) - 1)
    variance = between + (typical - 1) * within
    return float(min(0.95, max(0.0, (between - within) / variance))) if variance > 0 else 0.0
