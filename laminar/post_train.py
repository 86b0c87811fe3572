"""The streaming stage of a flow: ``post_train`` and ``evaluate``.

Called inside an ``@lm.flow`` function they become nodes of its Dask graph; the conductor
(``laminar_dask.conductor``) runs them on the cluster.
"""

from __future__ import annotations

import inspect
from typing import Any

from laminar.flow.context import RunContext
from laminar.flow.store import RunFolder
from laminar.flow.trace import stage
from laminar.settings import Evaluation, Policy
from laminar.specs import EvaluateSpec, PostTrainSpec
from laminar.trainer.config import UserConfig

__all__ = ["EvaluateSpec", "PostTrainSpec", "evaluate", "post_train"]

DATA = ("model", "environment", "evaluate_on")
"""The fields that may be results of other nodes."""


def post_train(**settings: Any) -> Any:
    """Post-train a model: rollouts, experience table, trainer and relays, each at its own pace.

    Takes the fields of ``PostTrainSpec`` as keyword arguments and returns, when the flow runs, a ``Policy``.

    Raises
    ------
    UserError
        An unknown field (with the nearest valid one), or a value out of range.
    """
    spec = PostTrainSpec(**settings)
    inputs: dict[str, Any] = {name: settings[name] for name in DATA if name in settings}
    return stage("post_train", post_train_stage, spec, inputs)


def _documented(function: Any, spec: type[UserConfig]) -> None:
    """Give a function that takes a spec's fields their signature and their descriptions."""
    fields = [f"    {name}\n        {field.description}" for name, field in spec.model_fields.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Fields", "------", *fields])
    function.__signature__ = inspect.signature(spec)


_documented(post_train, PostTrainSpec)


def evaluate(policy: Any, prompts: Any) -> Any:
    """Evaluate a policy on held-out prompts with the replicas that serve it: an ``Evaluation``."""
    spec = EvaluateSpec(policy=policy, prompts=prompts)
    return stage("evaluate", evaluate_stage, spec, {"policy": policy, "prompts": prompts})


async def post_train_stage(spec: PostTrainSpec, context: RunContext, **inputs: Any) -> Policy:
    """The node's function: runs as an async task on the data worker."""
    from laminar_dask.conductor import conduct

    spec = spec.model_copy(update=inputs)
    spec.check_kinds()
    policy: Policy = await conduct(spec, context)
    RunFolder(context.url).update_summary(policy.summary)
    return policy


async def evaluate_stage(spec: EvaluateSpec, context: RunContext, **inputs: Any) -> Evaluation:
    """The node's function: runs as an async task on the data worker."""
    from laminar_dask.evaluation import evaluate_policy

    spec = spec.model_copy(update=inputs)
    spec.check_kinds()
    evaluation: Evaluation = await evaluate_policy(spec.policy, spec.prompts, context)
    return evaluation
