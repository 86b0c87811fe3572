"""``bench relay``: what it costs to hand a version over, to take it, and to carry it from host to host.

Every figure is a field; where the machine cannot measure one it is None, and ``<field>_reason`` says why. Figures
that are taken for each transport are the worst of them, with all in ``<field>_by_transport``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from laminar.bench import say
from laminar.bench.hosts import loopback, why_not
from laminar.bench.relay_chains import measure_chain, measure_links
from laminar.bench.relay_changes import adamw_versions, measure_changes
from laminar.bench.relay_deaths import measure_repair
from laminar.bench.relay_memory import measure_handing_over
from laminar.bench.relay_training import measure_training
from laminar.errors import UserError
from laminar.weights.transport import installed

__all__ = ["PARTS", "bench_relay"]

SMALLER_IS_WORSE = ("star_over_chain", "link_ratio", "chain_rate_over_copy", "copy_bytes_per_second")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: bytes of a version, runs of which the median counts, relays killed by each transport; and
    in which network namespace the relays of one machine are (None: the caller's)."""

    nbytes: int
    repeats: int
    kills: int
    namespace: str | None


def _publish(sizes: Sizes) -> dict[str, Any]:
    return measure_handing_over(sizes.nbytes, 3 * sizes.repeats)  # a tenth of a second each, and noisy


def _chain(sizes: Sizes) -> dict[str, Any]:
    return _each(lambda name: measure_chain(name, sizes.nbytes, sizes.repeats, sizes.namespace), PARTS["chain"].fields)


def _links(sizes: Sizes) -> dict[str, Any]:
    return _each(lambda name: measure_links(name, sizes.repeats), PARTS["links"].fields)


def _changes(sizes: Sizes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures = adamw_versions(Path(folder))
        return figures | _each(partial(measure_changes, Path(folder)), PARTS["changes"].fields)


def _repair(sizes: Sizes) -> dict[str, Any]:
    return _each(lambda name: measure_repair(name, sizes.kills, sizes.namespace), PARTS["repair"].fields)


def _training(sizes: Sizes) -> dict[str, Any]:
    return _each(lambda name: measure_training(name, sizes.namespace), PARTS["training"].fields)


@dataclass(frozen=True, slots=True)
class Part:
    """Figures that are measured together. ``hosts``: between emulated hosts, which not every machine allows."""

    fields: tuple[str, ...]
    measure: Callable[[Sizes], dict[str, Any]]
    hosts: bool = False


PARTS = {
    "publish": Part(("publish_ratio", "pull_us", "pull_copies"), _publish),
    "links": Part(("chain_growth", "star_over_chain", "link_ratio"), _links, hosts=True),
    "changes": Part(("delta_bytes_ratio", "delta_time_ratio"), _changes, hosts=True),
    "repair": Part(("repair_ms_median", "repair_ms_p95"), _repair),
    "training": Part(("training_step_slowdown",), _training),
    "chain": Part(("chain_seconds", "chain_cpu_seconds_per_gib_hop", "chain_rate_over_copy"), _chain),
}
"""In this order: a machine that is lent by the hour may be slower just after minutes at full load."""


def bench_relay(
    *, only: Sequence[str] = (), nbytes: int = 1 << 30, repeats: int = 5, kills: int = 21
) -> dict[str, Any]:
    """Measure all there is to measure here; minutes.

    Parameters
    ----------
    only
        Names of ``PARTS``; none: all of them.
    nbytes
        Size of a version; less where memory is short (``bytes`` of each figure says how much).
    repeats
        Runs of which the median counts.
    kills
        Relays killed in the middle of a transfer, for each transport.

    Raises
    ------
    UserError
        There is no such part.
    """
    unknown = sorted(set(only) - set(PARTS))
    if unknown:
        raise UserError(f"bench relay has no part `{unknown[0]}`; there are: {', '.join(PARTS)}")
    no_hosts = why_not()
    with loopback(no_hosts) as (namespace, where):
        sizes = Sizes(nbytes, repeats, kills, namespace)
        figures: dict[str, Any] = {"transports": installed(), "repeats": repeats, "loopback": where}
        for name, part in PARTS.items():
            if only and name not in only:
                continue
            say(f"relay: {name}")
            figures |= _without(part.fields, no_hosts) if part.hosts and no_hosts else part.measure(sizes)
    return figures


def _each(measure: Callable[[str], dict[str, Any]], fields: Sequence[str]) -> dict[str, Any]:
    """Figures by each transport; where one could not be measured, all of ``fields`` are None and the reason said."""
    measured: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    for name in installed():
        say(f"  by {name}")
        try:
            measured[name] = measure(name)
        except (TimeoutError, RuntimeError, OSError) as error:
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    figures = _by_transport(measured) if measured else {}
    return figures | (_without(fields, "; ".join(reasons)) if reasons else {})


def _without(fields: Sequence[str], reason: str) -> dict[str, Any]:
    return dict.fromkeys(fields) | {f"{field}_reason": reason for field in fields}


def _by_transport(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Numbers: the worst transport's, and each one's."""
    figures: dict[str, Any] = {}
    for field in next(iter(measured.values())):
        each = {name: values[field] for name, values in measured.items()}
        if all(isinstance(value, float) for value in each.values()):
            figures[field] = (min if field in SMALLER_IS_WORSE else max)(each.values())
            figures[f"{field}_by_transport"] = each
        else:
            figures[field] = each
    return figures
