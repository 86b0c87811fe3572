"""Where prompts and rewards come from: data sets, generated problems, reward functions, and what runs them."""

from __future__ import annotations

from laminar.environments.answers import exact_match, extract_answer, math_equal
from laminar.environments.dataset import Dataset, dataset
from laminar.environments.environment import Environment, Prompts
from laminar.environments.reasoning_gym import ReasoningGym, reasoning_gym
from laminar.environments.scoring import Scorer

__all__ = [
    "Dataset",
    "Environment",
    "Prompts",
    "ReasoningGym",
    "Scorer",
    "dataset",
    "exact_match",
    "extract_answer",
    "math_equal",
    "reasoning_gym",
]
