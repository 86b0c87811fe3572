"""Faults of the transformers engine, and the ways of its library that it must make up for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.rollout.engine import Generation
from laminar.rollout.engines.packed_attention import length_groups
from laminar.rollout.engines.transformers import TransformersEngine
from laminar.trajectory import Sampling
from tests.rollout.answers import Answers, greedy, wait_until


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(str(checkpoint))
    engine.start()
    yield engine
    engine.close()


def failing(*args: Any) -> None:
    raise MemoryError("no memory for the logits")


def test_an_error_in_the_loop_ends_every_request_with_its_message(engine: TransformersEngine, answers: Answers) -> None:
    for i in range(3):
        engine.submit(Generation(f"e{i}", [1, 2, i], Sampling(1.0, 400)), answers)
    wait_until(lambda: len(engine.progress()) == 3, "tokens of three requests")
    engine._model.register_forward_pre_hook(failing)
    for answer in answers.wait(f"e{i}" for i in range(3)):
        assert (answer.finish_reason, answer.message) == ("error", "no memory for the logits")
        assert len(answer.ids) == len(answer.logprobs) > 0
    wait_until(lambda: not engine.alive(), "the engine says so")
    with pytest.raises(RuntimeError, match="the generation loop has ended: MemoryError: no memory"):
        engine.submit(Generation("late", [1], Sampling()), answers)
    with pytest.raises(RuntimeError, match="cannot load version 1: the generation loop has ended"):
        engine.load(1, engine.weights())
    engine.start()
    assert engine.alive()
    assert len(greedy(engine, [[1, 2]], 3)[0]) == 3


def test_starting_twice_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(RuntimeError, match="serves already"):
        engine.start()


def test_a_callback_that_raises_ends_no_other_request(
    engine: TransformersEngine, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers()
    engine.submit(Generation("bad", [1], Sampling(1.0, 2)), failing)
    engine.submit(Generation("good", [1], Sampling(1.0, 20)), answers)
    assert len(answers.wait(["good"])[0].ids) == 20
    assert "on_finish of request bad raised" in caplog.text


def test_a_cancellation_that_overtakes_its_request_is_kept(engine: TransformersEngine, answers: Answers) -> None:
    engine._batching.cancel("o#0")  # type: ignore[union-attr]
    greedy(engine, [[1]], 2)  # the loop has seen it
    with engine._lock:
        engine._serial = iter([0])  # type: ignore[assignment]
    engine.submit(Generation("o", [1, 2], Sampling(1.0, 400)), answers)
    assert answers.wait(["o"])[0].finish_reason == "abort"


def test_closing_from_a_callback_is_refused(engine: TransformersEngine) -> None:
    errors: list[str] = []
    answers = Answers()

    def close(generated: Any) -> None:
        try:
            engine.close()
        except RuntimeError as error:
            errors.append(str(error))
        answers(generated)

    engine.submit(Generation("c", [1], Sampling(1.0, 2)), close)
    answers.wait(["c"])
    assert "called by on_finish" in errors[0]
    assert engine.alive()


def test_packed_attention_answers_as_the_librarys_attention_does(
    make_checkpoint: Callable[..., Path], engine: TransformersEngine
) -> None:
    prompts = [[i % 60 for i in range(start, start + length)] for start, length in enumerate([380, *range(1, 40, 2)])]
    assert len(length_groups([len(prompt) for prompt in prompts])) > 1
    plain = TransformersEngine(str(make_checkpoint()), attention="sdpa", kv_tokens=4096)
    plain.start()
    plain.load(1, engine.weights())
    assert plain._model.config._attn_implementation == "sdpa" != engine._model.config._attn_implementation
    expected, packed = greedy(plain, prompts, 30), greedy(engine, prompts, 30)
    plain.close()
    assert packed == expected
