"""The means to wait for an engine's answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from laminar.rollout.engine import Engine, Generated, Generation
from laminar.trajectory import Sampling

__all__ = ["Answers", "generate", "greedy", "wait_until"]


class Answers:
    """Collects ``on_finish`` calls; every wait has a deadline."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Generated]] = {}
        self._changed = threading.Condition()

    def __call__(self, generated: Generated) -> None:
        with self._changed:
            self.calls.setdefault(generated.id, []).append(generated)
            self._changed.notify_all()

    def wait(self, ids: Iterable[str], deadline: float = 30.0) -> list[Generated]:
        """The answers to these requests, each of which came once."""
        wanted = list(ids)
        with self._changed:
            done = self._changed.wait_for(lambda: set(wanted) <= self.calls.keys(), deadline)
        missing = [id for id in wanted if id not in self.calls]
        assert done, f"{len(missing)} of {len(wanted)} answers missing after {deadline} s: {missing[:5]}"
        assert all(len(self.calls[id]) == 1 for id in wanted)
        return [self.calls[id][0] for id in wanted]


def generate(engine: Engine, generations: Sequence[Generation]) -> list[Generated]:
    """Submit all at once and wait for all."""
    answers = Answers()
    for generation in generations:
        engine.submit(generation, answers)
    return answers.wait(generation.id for generation in generations)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 24) -> list[list[int]]:
    """Greedy continuations of prompts that run together."""
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    generations = [Generation(f"greedy-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    return [list(answer.ids) for answer in generate(engine, generations)]


def wait_until(condition: Callable[[], bool], what: str, deadline: float = 10.0) -> None:
    """Look again and again until something is so."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline} s"
        threading.Event().wait(0.001)
