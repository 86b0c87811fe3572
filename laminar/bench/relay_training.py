"""What a training step on the same machine loses while versions go down a chain and relays die in the middle."""

from __future__ import annotations

import multiprocessing
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from laminar.bench.models import BASE
from laminar.bench.relay_chains import prepare, served
from laminar.bench.relays import bytes_layout, chain_of, relay_processes
from laminar.weights.forward import Report

__all__ = ["measure_training"]

SIZE = 512 << 20
ROWS = 32
"""So few that steps fit into transfers."""
ALONE = 15
ROUNDS = 3
VERSIONS = 3
START_DEADLINE = 120.0
RELAYS = 5

Step = tuple[float, float]
"""When a step began and ended, unix seconds."""


def measure_training(transport: str, namespace: str | None) -> dict[str, Any]:
    """``training_step_slowdown``: a learner's step while a chain on the same machine carries versions as fast as it
    can and two of its relays are killed, against the step alone. The median of the steps that fall into transfers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    learner = context.Process(target=_learn, args=(theirs,), daemon=True)
    learner.start()
    try:
        alone = _steps(ours, START_DEADLINE)[3:]
        under: list[Step] = []
        for _ in range(ROUNDS):
            under += _steps_under_transfers(ours, transport, namespace)
        alone += _steps(ours, START_DEADLINE)
    finally:
        learner.kill()
        learner.join(10)
        ours.close()
    if not under:
        raise RuntimeError("no training step fell into a transfer: transfers are too short for this measurement")
    usual = median(end - began for began, end in alone)
    return {
        "training_step_slowdown": median(end - began for began, end in under) / usual,
        "training_step_seconds": usual,
        "training_steps_under_transfers": len(under),
    }


def _steps_under_transfers(learner: Connection, transport: str, namespace: str | None) -> list[Step]:
    """Steps that began and ended while versions were on their way and relays died, one in each of the first two."""
    transfers: list[Step] = []
    spaces = [namespace] * RELAYS
    with relay_processes(RELAYS, transport, namespaces=spaces, progress_deadline=10.0) as (relays, members):
        prepare(relays, bytes_layout(SIZE))
        learner.send("until told")
        for version in range(1, VERSIONS + 1):
            relays[0].call("publish", version)
            began = relays[0].call("send", chain_of(members, version, SIZE, epoch=version))
            if len(relays) > 3:
                relays[-1].wait_for("fed", where=partial(_of, version))
                relays[1].signal(signal.SIGKILL)
                relays[1].end()
                del relays[1], members[1]
            transfers.append((began, served(relays[1:], version)))
        learner.send("enough")
        steps = _received(learner, START_DEADLINE)
    return [it for it in steps if any(began <= it[0] and it[1] <= end for began, end in transfers)]


def _of(version: int, report: Report) -> bool:
    return report.version == version


def _steps(learner: Connection, deadline: float) -> list[Step]:
    learner.send("some")
    return _received(learner, deadline)


def _received(learner: Connection, deadline: float) -> list[Step]:
    if not learner.poll(deadline):
        raise TimeoutError(f"the learner did not answer in {deadline:g} s")
    steps: list[Step] = learner.recv()
    return steps


def _learn(pipe: Connection) -> None:
    """Train when told to, and say when each step began and ended."""
    import torch

    from laminar.trainer.config import GRPO, AdamW
    from laminar.trainer.learner import Learner

    torch.set_num_threads(1)
    learner = Learner(BASE, GRPO(), AdamW(), temperature=1.0, seed=0)
    rows = _rows()

    def step() -> Step:
        began = time.time()
        learner.step(rows, version=0)
        return began, time.time()

    step()
    while True:
        try:
            told = pipe.recv()
        except EOFError:
            return
        if told == "some":
            pipe.send([step() for _ in range(ALONE)])
            continue
        steps = []
        while not pipe.poll():
            steps.append(step())
        pipe.recv()
        pipe.send(steps)


def _rows() -> Any:
    """Random answers of eight to a group, as the experience table leases them."""
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(0)
    lengths = random.integers(16, 48, ROWS)
    prompts = [random.integers(1, 16, 12).tolist() for _ in range(ROWS)]
    answers = [random.integers(1, 16, length).tolist() for length in lengths]
    return pa.table(
        {
            "group_id": pa.array([f"group-{index // 8}" for index in range(ROWS)]),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(answers, pa.list_(pa.int32())),
            "logprobs": pa.array([[-2.5] * length for length in lengths], pa.list_(pa.float32())),
            "loss_mask": pa.array([[1] * length for length in lengths], pa.list_(pa.int8())),
            "reward": pa.array(random.random(ROWS)),
            "finish_reason": pa.array(["stop"] * ROWS),
            "weight_version": pa.array([0] * ROWS),
        }
    )
