"""What is checked of ``post_train`` and ``evaluate`` before a run starts: each mistake is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import laminar as lm
from laminar.environments import Environment
from laminar.errors import UserError
from laminar.flow.trace import Pending
from laminar.specs import EvaluateSpec, PostTrainSpec
from laminar.trajectory import Prompt, Score

MODEL = Path(__file__).parents[1] / "flows" / "models" / "running-sums"
SUMS = lm.reasoning_gym("chain_sum", size=20)
POLICY = lm.Policy(checkpoint="c", version=1, run_id="r", step=1)


class Odd(Environment):
    """Three prompts with one text."""

    def __init__(self, text: str) -> None:
        self.name = "odd"
        self.text = text

    def __len__(self) -> int:
        return 3

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"odd-{index}", self.text, {})

    def score(self, prompt: Prompt, response: str) -> Score:
        return Score(reward=1.0)


def spec(**settings: Any) -> PostTrainSpec:
    """Settings that pass their check, but for those given."""
    right = {"model": str(MODEL), "environment": SUMS, "steps": 1, "batch_size": 16, "algorithm": lm.GRPO(group_size=8)}
    return PostTrainSpec(**{**right, "rollouts": lm.Rollouts(max_new_tokens=32), **settings})


def test_settings_that_are_right_pass_also_where_they_are_not_known_yet() -> None:
    spec(evaluate_on=SUMS).check()
    spec(model=Pending("base"), environment=Pending("data"), evaluate_on=Pending("held_out")).check()
    spec(model=POLICY).check()
    EvaluateSpec(policy=Pending("post_train"), prompts=SUMS).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "gsm8k"}, r"environment is a str \('gsm8k'\); expected an environment, such as lm.dataset"),
        ({"environment": None}, "environment is None; expected an environment"),
        ({"environment": [SUMS]}, "environment is a list .*; expected an environment"),
        ({"evaluate_on": "gsm8k"}, "evaluate_on is a str .*; expected an environment"),
        ({"model": 5}, r"model is a int \(5\); expected a checkpoint folder or a Policy"),
        ({"model": "Qwen/Qwen3-0.6B"}, "no such folder; expected a Hugging Face checkpoint folder"),
        ({"model": "emulated"}, "an emulated engine has the model 'emulated', and only it"),
        ({"evict": 5}, "evict is a int; expected a function"),
        ({"prompt_priority": "length"}, "prompt_priority is a str; expected a function"),
        ({"sampling": 5}, "sampling is a int; expected a function"),
        ({"sampling": "lifo"}, "there is no sampling 'lifo', did you mean 'fifo'"),
        ({"batch_size": 4}, "batch_size=4 is not a multiple of group_size=8; set batch_size to 8$"),
        ({"batch_size": 12}, "batch_size=12 is not a multiple of group_size=8; set batch_size to 8 or 16$"),
        ({"batch_size": 16, "capacity": 8}, "capacity=8 is less than batch_size=16"),
        ({"batch_size": 168}, "has 20 prompts, one step needs 21"),
        ({"rollouts": lm.Rollouts(max_new_tokens=250)}, "20 of 20 prompts of `chain_sum` are too long"),
        ({"environment": Odd("a\ud800")}, "prompt `odd-0` of `odd` cannot be encoded by the tokenizer of"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        spec(**settings).check()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "runs/a", "prompts": SUMS}, r"evaluate: policy is a str \('runs/a'\); expected a Policy"),
        ({"policy": POLICY, "prompts": None}, "evaluate: prompts is None; expected an environment"),
    ],
)
def test_an_evaluation_that_cannot_work_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluateSpec(**settings).check()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "config.json not found; expected a Hugging Face checkpoint folder"),
        ("config.json", "{", "config.json cannot be read .JSONDecodeError"),
        ("config.json", "[]", "config.json cannot be read .AttributeError"),
        ("tokenizer.json", "{}", "its tokenizer cannot be loaded: "),
        (
            "chat_template.jinja",
            "{{ raise_exception('a system turn is needed') }}",
            "encoded .*: TemplateError: a system",
        ),
        ("chat_template.jinja", "{% for %}", "cannot be encoded by the tokenizer of .*: TemplateSyntaxError"),
    ],
)
def test_a_checkpoint_that_is_damaged_is_one_line(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / file).unlink(missing_ok=True)
    if text is not None:
        (model / file).write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        spec(model=str(model)).check()
    assert "\n" not in str(raised.value)


def test_the_settings_of_a_group_are_named_where_they_are_no_settings_at_all() -> None:
    with pytest.raises(UserError, match="GRPO: 'GRPO' is not valid: input should be a valid dictionary"):
        spec(algorithm="GRPO")


def test_what_is_printed_before_a_run_is_one_unit_and_can_be_json() -> None:
    """verl #1524, #3288, #376: nobody has to ask whether a batch is prompts or answers."""
    derived = spec(steps=3).derived()
    assert derived["trajectories per step"] == 16 and derived["prompts per step"] == 2
    assert derived["samples per prompt"] == 8 and derived["trajectories in all"] == 48
    assert json.loads(json.dumps(derived)) == derived
