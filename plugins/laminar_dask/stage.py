"""What a ``post_train`` stage needs on the workers, as its spec says."""

from __future__ import annotations

from typing import Any

from laminar.flow.context import RunContext
from laminar.post_train import PostTrainSpec
from laminar.trainer.config import TrainerSettings
from laminar_dask.environment import EnvironmentPlugin
from laminar_dask.relay import RelayPlugin
from laminar_dask.repack import RepackPlugin, RepackSettings
from laminar_dask.replica import ReplicaPlugin, ReplicaSettings
from laminar_dask.table import TablePlugin

__all__ = ["trainer_settings", "worker_plugins"]


def worker_plugins(spec: PostTrainSpec, context: RunContext, model: str) -> list[Any]:
    """The plugins of all roles, to be registered once a stage, in this order."""
    rollouts = spec.rollouts
    replica = ReplicaSettings(
        run=context.run_id,
        model=model,
        engine=rollouts.engine,
        kv_tokens=rollouts.kv_tokens,
        slots=rollouts.slots,
        threads=rollouts.threads,
        seed=spec.seed,
        trajectory_deadline=spec.trajectory_deadline,
        dtype=spec.dtype,
        emulation=rollouts.emulation if rollouts.emulated else None,
    )
    repack = RepackSettings(
        run=context.run_id,
        cap=rollouts.max_new_tokens,
        slots=rollouts.slots,
        time_scale=rollouts.emulation.time_scale if rollouts.emulated else 1.0,
        automatic=rollouts.repack,
    )
    environments = [
        EnvironmentPlugin(environment.fingerprint(), environment, deadline=rollouts.score_deadline)
        for environment in (spec.environment, spec.evaluate_on)
        if environment is not None
    ]
    return [
        TablePlugin(context.url, spec.rules()),
        RelayPlugin(context.run_id),
        RepackPlugin(repack),
        ReplicaPlugin(replica),
        *environments,
    ]


def trainer_settings(spec: PostTrainSpec, context: RunContext, model: str) -> TrainerSettings:
    """What the trainer has to know."""
    return TrainerSettings(
        run=context.run_id,
        run_url=context.url,
        model=model,
        algorithm=spec.algorithm,
        optimizer=spec.optimizer,
        temperature=spec.rollouts.temperature,
        seed=spec.seed,
        dtype=spec.dtype,
        max_tokens_per_microbatch=spec.max_tokens_per_microbatch,
        checkpoint_every=spec.checkpoint_every,
        staleness_ceiling=spec.staleness_ceiling,
        threads=spec.trainer_threads,
    )
