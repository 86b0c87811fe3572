"""Only what changed between two versions: bytes and time against whole versions, over a link of 1 Gbit/s."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from laminar.bench.hosts import emulated_hosts
from laminar.bench.relay_chains import LINK_DEADLINE, LINK_MEGABITS, SLOTS, carry, served
from laminar.bench.relays import chain_of, relay_processes
from laminar.weights.layout import Layout, TensorSpec

__all__ = ["adamw_versions", "measure_changes"]


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
            carry(relays, members, 1, size)  # opens the connection
            for version, path in enumerate(paths, 2):
                before = relays[1].call("status").bytes_in
                digest = relays[0].call("publish_file", version, path)
                began = relays[0].call("send", chain_of(members, version, size, epoch=version))
                took.append(served(relays[1:], version) - began)
                sent.append(relays[1].call("status").bytes_in - before)
                if relays[1].call("proven", version) != digest:
                    raise RuntimeError(f"version {version} came out with other bytes by {transport}")
    return {
        "delta_bytes_ratio": median(sent[1:]) / sent[0],
        "delta_time_ratio": median(took[1:]) / took[0],
        "delta_seconds": {"whole": took[0], "changes": median(took[1:])},
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
    return {"delta_changed_share": median(shares), "delta_elements": width * width * depth}
