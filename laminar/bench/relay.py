"""``bench relay``: what it costs to hand a version over, to take it, and to carry it from host to host.

Every figure is a field; where the machine cannot measure one it is None, and ``<field>_reason`` says why. Figures
that are taken for each transport are the worst of them, with all in ``<field>_by_transport``.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.bench.hosts import PAYLOAD_SHARE, emulated_hosts, why_not
from laminar.bench.relays import RelayProcess, bytes_layout, chain_of, relay_processes
from laminar.weights.chain import Member, Plan
from laminar.weights.forward import Report
from laminar.weights.layout import Layout, TensorSpec
from laminar.weights.transport import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bench_relay"]

GIB = 1 << 30
HOPS = (1, 2, 4, 8)
LINK_BYTES = 128 << 20
LINK_MEGABITS = 1000
LINK_FIGURES = ("chain_growth", "star_over_chain", "link_ratio")
CHANGE_FIGURES = ("delta_bytes_ratio", "delta_time_ratio")
LINK_DEADLINE = 30.0
"""Progress deadline on shared, slow links: eight flows at once may leave one waiting for seconds."""
SLOTS = 2
"""A relay of the bench holds the version before and the one that comes."""


def bench_relay(*, nbytes: int = GIB, repeats: int = 5, kills: int = 10) -> dict[str, Any]:
    """Measure all there is to measure here; minutes.

    Parameters
    ----------
    nbytes
        Size of a version; less where memory is short (``bytes`` of each figure says how much).
    repeats
        Runs of which the median counts.
    kills
        Relays killed in the middle of a transfer, for each transport.
    """
    names = installed()
    figures: dict[str, Any] = {"transports": names, "repeats": repeats}
    figures |= measure_handing_over(nbytes, repeats)
    figures |= _each(names, lambda name: measure_chain(name, nbytes, repeats), ("chain_seconds",))
    reason = why_not()
    if reason is None:
        figures |= _each(names, lambda name: measure_links(name, repeats), LINK_FIGURES)
        with tempfile.TemporaryDirectory() as folder:
            figures |= adamw_versions(Path(folder))
            figures |= _each(names, lambda name: measure_changes(Path(folder), name), CHANGE_FIGURES)
    else:
        for field in LINK_FIGURES + CHANGE_FIGURES:
            figures |= {field: None, f"{field}_reason": reason}
    figures |= _each(names, lambda name: measure_repair(name, kills), ("repair_ms_median", "repair_ms_p95"))
    return figures


# -- one host ---------------------------------------------------------------------------------------------


def measure_handing_over(nbytes: int, repeats: int) -> dict[str, Any]:
    """``publish_ratio``, ``pull_us`` and ``pull_copies``."""
    import torch

    from laminar.weights.owner import SegmentOwner
    from laminar.weights.publisher import Publisher
    from laminar.weights.reader import WeightReader

    nbytes = _fits(nbytes, 6)
    tensors = {f"layer.{index}": torch.ones(nbytes // 64, dtype=torch.int32) for index in range(16)}
    with _folder() as base:
        copy_once = _copier(nbytes, base / "plain")
        owner = SegmentOwner(base / "laminar-publish")
        owner.prepare(Layout.of(tensors))
        publisher, reader = Publisher(owner.root), WeightReader(owner.root)
        stalls, copies, pulls, copied = [], [], [], 0
        try:
            for version in range(3 + repeats):
                copies.append(_seconds(copy_once))
                stalls.append(publisher.publish(version, tensors).seconds)
                owner.promote(version)
                began = time.perf_counter()
                with reader.pull(verify=False) as pulled:
                    pulls.append(time.perf_counter() - began)
                    with reader.pin(version) as pinned:
                        copied += _copies(pulled.tensors, pinned.slot.payload)
        finally:
            publisher.close()
            reader.close()
            owner.close()
    copy = statistics.median(copies[3:])
    return {
        "publish_ratio": statistics.median(stalls[3:]) / copy,
        "publish_seconds": statistics.median(stalls[3:]),
        "copy_seconds": copy,
        "publish_bytes": nbytes,
        "pull_us": statistics.median(pulls[3:]) * 1e6,
        "pull_first_us": statistics.median(pulls[:3]) * 1e6,
        "pull_copies": copied,
    }


def _copies(tensors: dict[str, Any], payload: memoryview) -> int:
    """How many tensors do not lie in the segment itself."""
    import numpy as np

    start = int(np.frombuffer(payload, np.uint8).ctypes.data)
    return sum(not start <= tensor.data_ptr() < start + len(payload) for tensor in tensors.values())


# -- chains -----------------------------------------------------------------------------------------------


def measure_chain(transport: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """``chain_seconds`` for each number of relays, CPU seconds a GiB and hop, and the rate against memory's."""
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    rates: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for hops in HOPS:
        size = _fits(nbytes, SLOTS * (hops + 1))
        with relay_processes(hops + 1, transport) as (relays, members):
            _prepare(relays, bytes_layout(size))
            runs = [_carry(relays, members, version, size) for version in range(1, repeats + 2)][1:]
        key = str(hops)
        sizes[key], seconds[key] = size, statistics.median(run[0] for run in runs)
        cpu[key] = statistics.median(run[1] for run in runs) / (size / GIB * hops)
        rates[key] = hops * size / seconds[key]
    copy = _copy_rate(_fits(nbytes, 2))
    last = str(HOPS[-1])
    return {
        "chain_seconds": seconds,
        "chain_bytes": sizes,
        "chain_cpu_seconds_per_gib_hop": cpu,
        "chain_rate_over_copy": rates[last] / copy,
        "copy_bytes_per_second": copy,
    }


def _carry(relays: Sequence[RelayProcess], members: Sequence[Member], version: int, size: int) -> tuple[float, float]:
    """One version down the chain: seconds until the last relay can serve it, and CPU seconds of all."""
    relays[0].call("publish", version)
    before = sum(relay.call("cpu") for relay in relays)
    began = relays[0].call("send", chain_of(members, version, size, epoch=version))
    seconds = _served(relays[1:], version) - began
    relays[0].wait_for("done", where=lambda report: report.version == version)
    return seconds, sum(relay.call("cpu") for relay in relays) - before


def _served(relays: Sequence[RelayProcess], version: int) -> float:
    return max(relay.wait_for("promoted", where=lambda it: it.version == version).at for relay in relays)


def _copy_rate(nbytes: int) -> float:
    """Bytes/s of a plain copy."""
    copy = _copier(nbytes)
    return nbytes / min(_seconds(copy) for _ in range(5))


def _copier(nbytes: int, shared: Path | None = None) -> Callable[[], None]:
    """A plain copy into warm memory (shared, where a file is given), by two threads where there are two cores."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    if shared is not None:
        with shared.open("w+b") as file:
            file.truncate(nbytes)
            target = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        target[:] = 1
    border = nbytes // 2 if (os.cpu_count() or 1) > 1 else nbytes

    def copy() -> None:
        other = threading.Thread(target=np.copyto, args=(target[border:], source[border:]))
        other.start()
        np.copyto(target[:border], source[:border])
        other.join()

    return copy


# -- links ------------------------------------------------------------------------------------------------


def measure_links(transport: str, repeats: int) -> dict[str, Any]:
    """``chain_growth``, ``star_over_chain`` and ``link_ratio`` over links of 1 Gbit/s."""
    repeats = min(repeats, 3)
    hops = HOPS[-1]
    with emulated_hosts(hops + 1, LINK_MEGABITS) as hosts:
        with relay_processes(
            hops + 1, transport, hosts=hosts.addresses, namespaces=hosts.namespaces, progress_deadline=LINK_DEADLINE
        ) as (relays, members):
            _prepare(relays, bytes_layout(LINK_BYTES))
            runs = range(1, repeats + 2)
            one = _median([_carry(relays[:2], members[:2], version, LINK_BYTES)[0] for version in runs])
            runs = range(runs.stop, runs.stop + repeats + 1)
            all_ = _median([_carry(relays, members, version, LINK_BYTES)[0] for version in runs])
            star = _star(relays, members, runs.stop)
    allowed = LINK_MEGABITS * 1e6 / 8 * PAYLOAD_SHARE
    return {
        "chain_growth": all_ / one,
        "star_over_chain": star / all_,
        "link_ratio": LINK_BYTES / one / allowed,
        "link_seconds": {"1": one, str(hops): all_, "star": star},
    }


def _star(relays: Sequence[RelayProcess], members: Sequence[Member], version: int) -> float:
    """The first relay sends to every other one by itself: seconds until the last can serve."""
    root = relays[0]
    root.call("publish", version)
    began = time.time()
    for index, member in enumerate(members[1:]):
        plan = chain_of([members[0], member], version, LINK_BYTES, epoch=1000 + index, chunk=1 << 20)
        root.call("stand_in", root.setting.root, plan)
    return _served(relays[1:], version) - began


# -- deaths -----------------------------------------------------------------------------------------------


def measure_repair(transport: str, kills: int) -> dict[str, Any]:
    """``repair_ms_median`` and ``repair_ms_p95``: from a kill -9 in the middle to new bytes behind the dead relay."""
    took: list[float] = []
    size = 256 << 20
    for number in range(kills):
        victim = 1 + number % 3
        with relay_processes(5, transport, progress_deadline=10.0) as (relays, members):
            _prepare(relays, bytes_layout(size))
            digest = relays[0].call("publish", 1)
            relays[0].call("send", Plan(1, 1, tuple(members), 1 << 20, 0, size))
            relays[-1].wait_for("fed")
            killed = relays[victim].signal(signal.SIGKILL)
            after = relays[victim + 1].wait_for("fed", where=_after(killed))
            took.append((after.at - killed) * 1000)
            living = [relay for index, relay in enumerate(relays[1:], 1) if index != victim]
            _served(living, 1)
            if {relay.call("proven", 1) for relay in living} != {digest}:
                raise RuntimeError(f"after a kill of relay {victim} by {transport} a survivor holds other bytes")
    return {"repair_ms_median": _median(took), "repair_ms_p95": _p95(took), "repair_ms": took}


def _after(moment: float) -> Callable[[Report], bool]:
    return lambda report: report.at > moment


# -- changes ----------------------------------------------------------------------------------------------


def measure_changes(folder: Path, transport: str) -> dict[str, Any]:
    """``delta_bytes_ratio`` and ``delta_time_ratio``: changes / whole version, over a link of 1 Gbit/s.

    The versions are those that ``adamw_versions`` left. One hop; every relay's bytes are compared with the sent ones.
    """
    paths = sorted(folder.glob("version-*"))
    size = paths[0].stat().st_size
    layout = Layout.pack([TensorSpec("weights", "bfloat16", (size // 2,), size)])
    with emulated_hosts(2, LINK_MEGABITS) as hosts:
        with relay_processes(
            2, transport, hosts=hosts.addresses, namespaces=hosts.namespaces, progress_deadline=LINK_DEADLINE
        ) as (relays, members):
            for relay in relays:
                relay.call("prepare", layout, SLOTS)
            took, sent = [], []
            _carry(relays, members, 1, size)  # opens the connection
            for version, path in enumerate(paths, 2):
                before = relays[1].call("status").bytes_in
                digest = relays[0].call("publish_file", version, path)
                began = relays[0].call("send", chain_of(members, version, size, epoch=version))
                took.append(_served(relays[1:], version) - began)
                sent.append(relays[1].call("status").bytes_in - before)
                if relays[1].call("proven", version) != digest:
                    raise RuntimeError(f"version {version} came out with other bytes by {transport}")
    return {
        "delta_bytes_ratio": _median(sent[1:]) / sent[0],
        "delta_time_ratio": _median(took[1:]) / took[0],
        "delta_seconds": {"whole": took[0], "changes": _median(took[1:])},
    }


def adamw_versions(folder: Path, *, steps: int = 4, lr: float = 1e-6) -> dict[str, Any]:
    """Files ``version-0..steps`` of bfloat16 weights as they are after each AdamW step, and the share that changed.

    The optimizer keeps float32 weights, as trainers do; what is served is rounded. A stack of layers with weights
    of the usual size and gradients of a real loss.
    """
    import numpy as np
    import torch

    torch.manual_seed(0)
    width, depth = 2048, 8
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    shares: list[float] = []
    before: Any = None
    for step in range(steps + 1):
        if step:
            inputs = torch.randn(16, width)
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).to(torch.bfloat16)
        words = flat.view(torch.int16).numpy()
        words.tofile(folder / f"version-{step}")
        if before is not None:
            shares.append(float(np.mean(words != before)))
        before = words
    return {"delta_changed_share": statistics.median(shares), "delta_elements": width * width * depth}


# -- plain things -----------------------------------------------------------------------------------------


def _each(names: Sequence[str], measure: Callable[[str], dict[str, Any]], fields: Sequence[str]) -> dict[str, Any]:
    """Figures by each transport; where one could not be measured, all of ``fields`` are None and the reason said."""
    measured: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            measured[name] = measure(name)
        except (TimeoutError, RuntimeError, OSError) as error:
            reason = f"{name}: {type(error).__name__}: {error}"
            nothing: dict[str, Any] = dict.fromkeys(fields)
            return nothing | {f"{field}_reason": reason for field in fields}
    return _by_transport(measured)


def _by_transport(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Numbers: the worst transport's (the largest, of ratios that should be large the smallest), and each one's."""
    large = {"star_over_chain", "link_ratio", "chain_rate_over_copy", "copy_bytes_per_second"}
    figures: dict[str, Any] = {}
    for field in next(iter(measured.values())):
        each = {name: values[field] for name, values in measured.items()}
        if all(isinstance(value, float) for value in each.values()):
            figures[field] = (min if field in large else max)(each.values())
            figures[f"{field}_by_transport"] = each
        else:
            figures[field] = each
    return figures


def _prepare(relays: Sequence[RelayProcess], layout: Layout) -> None:
    for relay in relays:
        relay.call("prepare", layout, SLOTS)


def _fits(nbytes: int, buffers: int) -> int:
    """At most ``nbytes``, and no more than so many buffers find room for in half of what is free."""
    stats = os.statvfs("/dev/shm")
    with open("/proc/meminfo") as file:
        memory = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    room = min(stats.f_bavail * stats.f_frsize, memory) * 85 // 100
    return min(nbytes, room // buffers) >> 20 << 20


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"bench-relay-{uuid.uuid4().hex[:6]}-", dir="/dev/shm") as folder:
        yield Path(folder)


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _p95(values: Sequence[float]) -> float:
    return float(sorted(values)[min(len(values) - 1, round(0.95 * len(values)))])
