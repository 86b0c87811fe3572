from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch

from laminar.trainer import checkpoint
from laminar.trainer.learner import Learner
from tests.trainer.micro import rows


@pytest.fixture(params=["file", "memory"])
def checkpoints(request, tmp_path: Path) -> str:
    """URL of a run's folder of checkpoints, on a local disk and on a store without renames."""
    return f"{tmp_path}/checkpoints" if request.param == "file" else f"memory://{uuid.uuid4().hex}/checkpoints"


def write(checkpoints: str, step: int, content: str = "weights") -> str:
    url = checkpoint.step_folder(checkpoints, step)
    checkpoint.write(
        url, lambda folder: (folder / "model").write_text(content) and None, step=step, version=step, extra={}
    )
    return url


def content(url: str) -> str:
    with checkpoint.as_local(url) as folder:
        return (folder / "model").read_text()


def settings() -> dict:
    return {"temperature": 1.0, "seed": 0}


def test_there_is_none_before_the_first(checkpoints):
    assert checkpoint.latest(checkpoints) is None
    assert checkpoint.read_version(checkpoints) is None


def test_the_newest_is_the_one_of_the_highest_step_and_the_last_ones_are_kept(checkpoints):
    for step in (20, 5, 40, 30):
        write(checkpoints, step)
    assert checkpoint.latest(checkpoints).step == 40
    checkpoint.prune(checkpoints, keep=2)
    assert [found.step for found in checkpoint.complete(checkpoints)] == [30, 40]


def test_a_writer_killed_half_way_leaves_the_older_one_valid(checkpoints):
    write(checkpoints, 10, "old")

    class Killed(BaseException):
        pass

    def die(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise Killed

    with pytest.raises(Killed):
        checkpoint.write(checkpoint.step_folder(checkpoints, 20), die, step=20, version=20, extra={})
    assert checkpoint.latest(checkpoints).step == 10


@pytest.mark.parametrize("marker", [None, "", '{"step": 20, "ver'])
def test_a_half_written_folder_is_not_seen_and_is_replaced_by_the_next_save(tmp_path, marker):
    checkpoints = f"{tmp_path}/checkpoints"
    write(checkpoints, 10, "old")
    half = Path(checkpoint.step_folder(checkpoints, 20))
    half.mkdir()
    (half / "model").write_text("half")
    if marker is not None:
        (half / "trainer.json").write_text(marker)
    assert checkpoint.latest(checkpoints).step == 10
    write(checkpoints, 20, "whole")
    assert content(checkpoint.latest(checkpoints).url) == "whole"


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    checkpoints = f"{tmp_path}/checkpoints"
    write(checkpoints, 10)
    leftover = Path(checkpoints) / ".writing-dead"
    leftover.mkdir()
    (leftover / "model").write_text("half")
    checkpoint.prune(checkpoints, keep=2)
    assert sorted(path.name for path in Path(checkpoints).iterdir()) == ["step-000010"]


def test_the_final_one_keeps_its_name_and_outlives_its_step(checkpoints):
    final = checkpoint.mark_final(checkpoints, write(checkpoints, 10, "first"))
    assert checkpoint.mark_final(checkpoints, write(checkpoints, 20, "second")) == final
    write(checkpoints, 30), write(checkpoints, 40)
    checkpoint.prune(checkpoints, keep=2)
    assert (content(final), checkpoint.read(final).step) == ("second", 20)


def test_the_newest_version_is_remembered(checkpoints):
    for version in (0, 1, 7):
        checkpoint.write_version(checkpoints, version)
        assert checkpoint.read_version(checkpoints) == version
    assert checkpoint.complete(checkpoints) == []


def test_a_saved_model_loads_with_transformers_and_brings_its_tokenizer(make_learner, tmp_path):
    from transformers import AutoModelForCausalLM

    learner = make_learner()
    learner.step(rows(), version=3)
    url = checkpoint.step_folder(f"{tmp_path}/checkpoints", 1)
    learner.save(url, step=1, version=4, extra={"trained": 13})
    loaded = AutoModelForCausalLM.from_pretrained(url).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in learner.tensors().items())
    assert (Path(url) / "tokenizer.json").read_text() == "{}"
    assert json.loads((Path(url) / "trainer.json").read_text())["extra"] == {"trained": 13}


@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_step_after_a_resume_is_bit_for_bit_the_one_that_would_have_followed(
    make_learner, checkpoints, minibatches
):
    learner = make_learner(minibatches=minibatches)
    learner.config = learner.config.model_copy(update={"warmup_steps": 10})
    for seed in range(2):
        learner.step(rows(seed=seed), version=3)
    url = checkpoint.step_folder(checkpoints, 2)
    learner.save(url, step=2, version=5, extra={})
    resumed = Learner.load(url, learner.algorithm, learner.config, **settings())
    first, second = (one.step(rows(seed=9), version=3).as_dict() for one in (learner, resumed))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert all(torch.equal(resumed.tensors()[name], tensor) for name, tensor in learner.tensors().items())


def test_the_first_step_after_a_resume_has_a_ratio_of_one(make_learner, tmp_path):
    learner = make_learner()
    learner.step(rows(), version=3)
    table = rows(seed=5, learner=learner)
    learner.save(f"{tmp_path}/step-000001", step=1, version=4, extra={})
    resumed = Learner.load(f"{tmp_path}/step-000001", learner.algorithm, learner.config, **settings())
    assert resumed.step(table, version=4).importance_ratio_max == pytest.approx(1, abs=1e-4)


def test_a_resumed_run_takes_the_optimizer_settings_it_is_given(make_learner, tmp_path):
    learner = make_learner(lr=1e-3)
    learner.step(rows(), version=3)
    learner.save(f"{tmp_path}/step-000001", step=1, version=4, extra={})
    slower = learner.config.model_copy(update={"lr": 1e-5, "betas": (0.5, 0.6)})
    resumed = Learner.load(f"{tmp_path}/step-000001", learner.algorithm, slower, **settings())
    assert resumed.step(rows(), version=4).learning_rate == 1e-5
    assert resumed._optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_loading_what_is_not_complete_says_so(make_learner, tmp_path):
    learner = make_learner()
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        Learner.load(f"{tmp_path}/step-000001", learner.algorithm, learner.config, **settings())
