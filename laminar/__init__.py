"""Laminar: asynchronous RL post-training of language models as a dataflow on Dask.

``import laminar as lm`` costs little: every name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laminar.environments.answers import exact_match, extract_answer, math_equal
    from laminar.environments.dataset import dataset
    from laminar.environments.environment import Environment, Prompts
    from laminar.environments.mixture import mix
    from laminar.environments.reasoning_gym import reasoning_gym
    from laminar.errors import LaminarError, RunFailed, UserError
    from laminar.experience.samplers import priority
    from laminar.flow.flow import flow
    from laminar.flow.results import Run, RunResult, open_run
    from laminar.flow.task import task
    from laminar.post_train import evaluate, post_train
    from laminar.rollout.emulation import Emulation
    from laminar.settings import Evaluation, Policy, Rollouts
    from laminar.trainer.config import GRPO, AdamW

__all__ = [
    "GRPO",
    "AdamW",
    "Emulation",
    "Environment",
    "Evaluation",
    "LaminarError",
    "Policy",
    "Prompts",
    "Rollouts",
    "Run",
    "RunFailed",
    "RunResult",
    "UserError",
    "dataset",
    "evaluate",
    "exact_match",
    "extract_answer",
    "flow",
    "math_equal",
    "mix",
    "open_run",
    "post_train",
    "priority",
    "reasoning_gym",
    "task",
]

_HOME = {
    "GRPO": "laminar.trainer.config",
    "AdamW": "laminar.trainer.config",
    "Emulation": "laminar.rollout.emulation",
    "Environment": "laminar.environments.environment",
    "Evaluation": "laminar.settings",
    "LaminarError": "laminar.errors",
    "Policy": "laminar.settings",
    "Prompts": "laminar.environments.environment",
    "Rollouts": "laminar.settings",
    "Run": "laminar.flow.results",
    "RunFailed": "laminar.errors",
    "RunResult": "laminar.flow.results",
    "UserError": "laminar.errors",
    "dataset": "laminar.environments.dataset",
    "evaluate": "laminar.post_train",
    "exact_match": "laminar.environments.answers",
    "extract_answer": "laminar.environments.answers",
    "flow": "laminar.flow.flow",
    "math_equal": "laminar.environments.answers",
    "mix": "laminar.environments.mixture",
    "open_run": "laminar.flow.results",
    "post_train": "laminar.post_train",
    "priority": "laminar.experience.samplers",
    "reasoning_gym": "laminar.environments.reasoning_gym",
    "task": "laminar.flow.task",
}
"""Where each public name is defined."""


class _Package(ModuleType):
    """``laminar.flow`` and ``laminar.post_train`` are functions *and* modules of that name.

    Importing a module sets it as an attribute of its package. Here the function keeps the name, whichever is
    imported first; the modules are reached with ``from laminar.flow import …``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # a function that travels by value may use `lm`


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("laminar-flow")
    if name not in _HOME:
        raise AttributeError(f"module 'laminar' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
