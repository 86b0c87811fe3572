from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from laminar.errors import UserError
from laminar.trainer.config import GRPO, AdamW, TrainerSettings


def test_an_unknown_field_is_one_line_that_names_the_nearest():
    with pytest.raises(UserError, match=r"^AdamW: unknown field 'warm_up_steps', did you mean 'warmup_steps'\?$"):
        AdamW(warm_up_steps=3)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (GRPO, {"group_size": 1}),
        (GRPO, {"clip_low": 1.0}),
        (GRPO, {"importance_cap": 0.5}),
        (GRPO, {"scale_advantages": "mean"}),
        (GRPO, {"entropy_coefficient": float("nan")}),
        (AdamW, {"lr": -1.0}),
        (AdamW, {"betas": (0.9, 1.0)}),
        (AdamW, {"max_grad_norm": 0}),
        (AdamW, {"lr": "fast"}),
    ],
)
def test_a_value_out_of_range_is_one_line_that_names_the_field(config, values):
    with pytest.raises(UserError) as error:
        config(**values)
    assert str(error.value).startswith(f"{config.__name__}: {next(iter(values))}")
    assert "\n" not in str(error.value)


def test_every_field_is_documented():
    for config in (GRPO, AdamW):
        assert all(field.description for field in config.model_fields.values())


def test_settings_travel_between_processes():
    settings = TrainerSettings("r", "file:///runs/r/", "m", GRPO(group_size=4), AdamW(lr=1e-5))
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.checkpoints == "file:///runs/r/checkpoints"


def test_configuration_loads_without_torch():
    code = "import sys, laminar.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
