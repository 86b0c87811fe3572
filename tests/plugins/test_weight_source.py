"""A replica serves just what was published, whatever the engine keeps it in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laminar.errors import RunFailed
from laminar.rollout.engines import create_engine
from laminar.trainer.model import ServedTensors, load_model
from laminar.weights.layout import Layout
from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher
from laminar_dask import versions
from tests.trainer.micro import save_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(model_folder: Path) -> ServedTensors:
    """A model as the trainer publishes it in bfloat16, after an update."""
    model = load_model(model_folder, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    return ServedTensors(model, torch.bfloat16)


@pytest.fixture
def source(tmp_path: Path, served: ServedTensors, monkeypatch: pytest.MonkeyPatch) -> Iterator[versions.RelaySource]:
    root = tmp_path / "segment"
    root.mkdir()
    owner = SegmentOwner(root)
    owner.prepare(Layout.of(served))
    publisher = Publisher(root)
    publisher.publish(4, served)
    owner.promote(4)
    monkeypatch.setattr(versions, "segment_root", lambda run: root)
    source = versions.RelaySource("run")
    yield source
    source.close()
    publisher.close()
    owner.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_serves_bfloat16_weights_in_its_own_type_or_a_wider_one(source, served, model_folder, dtype) -> None:
    engine = create_engine("transformers", str(model_folder), dtype=dtype)
    engine.start()
    try:
        source.load(engine, source.newest())
        assert engine.version == 4
        name = "model.layers.0.mlp.up_proj.weight"
        assert engine.weights()[name].dtype == getattr(torch, dtype)
        assert torch.equal(engine.weights()[name].float(), served[name].float())
    finally:
        engine.close()


def test_an_engine_that_serves_other_weights_does_not_go_on(source, model_folder) -> None:
    engine = create_engine("transformers", str(model_folder))
    engine.start()
    load = engine.load

    def badly(version, tensors) -> None:
        load(version, tensors)
        next(iter(engine.weights().values())).view(-1)[3] += 1

    engine.load = badly
    try:
        with pytest.raises(RunFailed, match="version 4 was published with"):
            source.load(engine, 4)
    finally:
        engine.close()
