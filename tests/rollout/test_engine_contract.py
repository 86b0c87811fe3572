"""What every engine promises, each against the real thing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from laminar.errors import UserError
from laminar.rollout.engine import Engine, Generation
from laminar.rollout.engines import KINDS, create_engine
from laminar.trajectory import Sampling
from tests.rollout.answers import Answers, generate, greedy, wait_until
from tests.rollout.conftest import POSITIONS, VOCABULARY

PROMPTS = [[random.Random(i).randrange(VOCABULARY) for _ in range(1 + 7 * i)] for i in range(8)]
LONG_PROMPT = [random.Random(99).randrange(VOCABULARY) for _ in range(150)]  # many pages


@pytest.fixture(scope="module", params=sorted(KINDS.keys() - {"emulated"}))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start(kind: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines and closes them in the end."""
    engines: list[Engine] = []

    def start(path: Path, **options: object) -> Engine:
        engines.append(create_engine(kind, str(path), **options))
        engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], checkpoint: Path) -> Engine:
    """One engine for the tests that leave it as they found it."""
    return start(checkpoint)


def random_weights(engine: Engine, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(tensor) * 0.2 for name, tensor in engine.weights().items()}


def token_logprobs(model: Qwen3ForCausalLM, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """As a trainer computes them: one forward pass, log-softmax of the logits over the temperature."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprob_of_every_token_is_that_of_the_distribution_it_was_drawn_from(
    engine: Engine, reference: Qwen3ForCausalLM, temperature: float
) -> None:
    generations = [
        Generation(f"g{i}-{s}", prompt, Sampling(temperature, 5 + 9 * s))
        for i, prompt in enumerate(PROMPTS)
        for s in range(4)
    ]
    for generation, answer in zip(generations, generate(engine, generations), strict=True):
        expected = token_logprobs(reference, list(generation.prompt_ids), list(answer.ids), temperature)
        assert len(answer.ids) == generation.sampling.max_new_tokens
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_each_request_has_its_own_temperature(engine: Engine, reference: Qwen3ForCausalLM) -> None:
    temperatures = [0.0, 0.6, 1.0, 1.3]
    generations = [Generation(f"t{t}", PROMPTS[2], Sampling(t, 30)) for t in temperatures]
    answers = generate(engine, generations)
    assert list(answers[0].ids) == greedy(engine, [PROMPTS[2]], 30)[0]
    assert set(answers[0].logprobs) == {0.0}
    for temperature, answer in zip(temperatures[1:], answers[1:], strict=True):
        expected = token_logprobs(reference, PROMPTS[2], list(answer.ids), temperature)
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_samples_of_one_prompt_differ(engine: Engine) -> None:
    answers = generate(engine, [Generation(f"s{i}", LONG_PROMPT, Sampling(1.0, 20)) for i in range(8)])
    assert len({tuple(answer.ids) for answer in answers}) == 8


def test_greedy_equals_the_librarys_generate(engine: Engine, reference: Qwen3ForCausalLM) -> None:
    prompts = [*PROMPTS, LONG_PROMPT]
    for prompt, ids in zip(prompts, greedy(engine, prompts, 40), strict=True):
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
        assert ids == whole[len(prompt) :]


def test_any_of_several_stop_tokens_ends_an_answer_and_is_part_of_it(
    start: Callable[..., Engine], make_checkpoint: Callable[..., Path], engine: Engine
) -> None:
    free = greedy(engine, PROMPTS, 40)
    eos = [free[1][6], free[3][9]]
    stopping = start(make_checkpoint(eos=eos))
    sampling = Sampling(0.0, 40)
    answers = generate(stopping, [Generation(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)])
    for answer, ids in zip(answers, free, strict=True):
        stops = [i for i, token in enumerate(ids) if token in eos]
        expected = ids[: stops[0] + 1] if stops else ids
        assert list(answer.ids) == expected
        assert answer.finish_reason == ("stop" if stops else "length")
    assert {answer.ids[-1] for answer in answers if answer.finish_reason == "stop"} == set(eos)
    over = generate(stopping, [Generation("over", [5], sampling, [7, eos[1]], [-0.5, -0.25])])[0]
    assert (over.ids, over.logprobs, over.finish_reason) == ([7, eos[1]], [-0.5, -0.25], "stop")


def test_abort_gives_the_partial_answer_once(engine: Engine, answers: Answers) -> None:
    whole = greedy(engine, [PROMPTS[3]], 400)[0]
    engine.submit(Generation("a", PROMPTS[3], Sampling(0.0, 400)), answers)
    wait_until(lambda: any(delta.ids for delta in engine.progress()), "first token")
    engine.abort("a")
    engine.abort("a")
    [partial] = answers.wait(["a"])
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.ids) == len(partial.logprobs) < 400
    assert list(partial.ids) == whole[: len(partial.ids)]
    assert partial.first_token_at == pytest.approx(time.time(), abs=10)
    engine.abort("a")
    engine.abort("never submitted")
    greedy(engine, [PROMPTS[0]])
    assert len(answers.calls["a"]) == 1


def test_every_one_of_many_aborted_requests_ends_once(engine: Engine, answers: Answers) -> None:
    ids = [f"m{i}" for i in range(60)]
    for i, id in enumerate(ids):
        engine.submit(Generation(id, PROMPTS[i % 8], Sampling(1.0, 1 + i)), answers)
        if i % 2:
            engine.abort(id)
    reasons = {answer.finish_reason for answer in answers.wait(ids)}
    assert reasons == {"abort", "length"}
    assert engine.gauges().running == engine.gauges().waiting == 0


def test_an_aborted_request_may_be_submitted_again_under_its_id(engine: Engine) -> None:
    for _ in range(20):
        first, second = Answers(), Answers()
        engine.submit(Generation("again", PROMPTS[4], Sampling(0.0, 300)), first)
        engine.abort("again")
        assert first.wait(["again"])[0].finish_reason == "abort"
        engine.submit(Generation("again", PROMPTS[4], Sampling(0.0, 3)), second)
        assert len(second.wait(["again"])[0].ids) == 3


def test_resume_from_any_point_continues_to_the_same_answer(engine: Engine) -> None:
    sampling = Sampling(0.0, 24)
    whole = greedy(engine, [PROMPTS[5]], 24)[0]
    made_up = [-0.125 * i for i in range(24)]
    resumed = [Generation(f"r{n}", PROMPTS[5], sampling, whole[:n], made_up[:n]) for n in range(25)]
    for n, answer in enumerate(generate(engine, resumed)):
        assert list(answer.ids) == whole
        assert list(answer.logprobs[:n]) == made_up[:n]
        assert (len(answer.logprobs), answer.finish_reason) == (24, "length")


def test_progress_adds_up_to_the_answer(engine: Engine, answers: Answers) -> None:
    prefix = [3, 1, 4]
    generations = [Generation("p0", PROMPTS[1], Sampling(1.0, 200), prefix, [-1.0, -2.0, -3.0])]
    generations += [Generation(f"p{i}", PROMPTS[i], Sampling(1.0, 60 * i)) for i in range(1, 4)]
    streamed: dict[str, tuple[list[int], list[float]]] = {g.id: ([], []) for g in generations}
    streamed["p0"] = (list(prefix), [-1.0, -2.0, -3.0])
    for generation in generations:
        engine.submit(generation, answers)

    def all_ended() -> bool:
        for delta in engine.progress():
            ids, logprobs = streamed[delta.id]
            assert delta.start == len(ids)
            assert len(delta.ids) == len(delta.logprobs) > 0
            ids.extend(delta.ids)
            logprobs.extend(delta.logprobs)
        return len(answers.calls) == len(generations)

    wait_until(all_ended, "all answers")
    for answer in answers.wait(streamed):
        ids, logprobs = streamed[answer.id]
        assert list(answer.ids[: len(ids)]) == ids
        assert list(answer.logprobs[: len(ids)]) == logprobs
        assert len(ids) > 3
    assert engine.progress() == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    prefix=st.lists(st.integers(0, VOCABULARY - 1), max_size=40),
)
def test_token_ids_go_in_and_out_unchanged(
    engine: Engine, reference: Qwen3ForCausalLM, prompt: list[int], prefix: list[int]
) -> None:
    made_up = [-float(i) for i in range(len(prefix))]
    answer = generate(engine, [Generation("ids", prompt, Sampling(1.0, len(prefix) + 2), prefix, made_up)])[0]
    new = list(answer.ids[len(prefix) :])
    assert list(answer.ids[: len(prefix)]) == prefix
    assert list(answer.logprobs[: len(prefix)]) == made_up
    expected = token_logprobs(reference, [*prompt, *prefix], new, 1.0)
    assert torch.allclose(torch.tensor(answer.logprobs[len(prefix) :]), expected, atol=1e-4, rtol=0)


def test_after_each_of_three_swaps_answers_are_those_of_a_fresh_engine(
    start: Callable[..., Engine], checkpoint: Path
) -> None:
    prompts = [*PROMPTS, LONG_PROMPT, [*LONG_PROMPT, 7], LONG_PROMPT]  # the cache holds these prefixes
    swapped = start(checkpoint)
    assert swapped.version is None
    before = [greedy(swapped, prompts)]
    for version in (1, 2, 5):
        swapped.load(version, random_weights(swapped, version))
        assert swapped.version == version
        fresh = start(checkpoint)
        fresh.load(0, random_weights(fresh, version))
        answer = greedy(swapped, prompts)
        assert answer == greedy(fresh, prompts)
        assert answer not in before
        before.append(answer)


def test_loading_the_same_weights_changes_no_answer(engine: Engine) -> None:
    before = greedy(engine, [*PROMPTS, LONG_PROMPT])
    engine.load(3, {name: tensor.clone() for name, tensor in engine.weights().items()})
    assert greedy(engine, [*PROMPTS, LONG_PROMPT]) == before


def test_weights_served_are_those_loaded(start: Callable[..., Engine], checkpoint: Path) -> None:
    engine = start(checkpoint)
    tensors = random_weights(engine, 7)
    engine.load(1, tensors)
    assert engine.weights().keys() == tensors.keys()
    assert all(torch.equal(served, tensors[name]) for name, served in engine.weights().items())


def test_load_is_refused_while_a_request_runs(engine: Engine, answers: Answers) -> None:
    version, tensors = engine.version, random_weights(engine, 1)
    engine.submit(Generation("busy", PROMPTS[0], Sampling(1.0, 400)), answers)
    with pytest.raises(RuntimeError, match="1 requests are running"):
        engine.load(9, tensors)
    engine.abort("busy")
    answers.wait(["busy"])
    assert engine.version == version
    assert greedy(engine, [PROMPTS[0]], 5) == greedy(engine, [PROMPTS[0]], 5)


def test_weights_of_another_model_are_refused_by_name(engine: Engine) -> None:
    version, before = engine.version, greedy(engine, PROMPTS)
    tensors = dict(engine.weights())
    name, tensor = next(iter(tensors.items()))
    with pytest.raises(ValueError, match=rf"missing \['{name}'\], unexpected \['extra'\]"):
        engine.load(9, {**{n: t for n, t in tensors.items() if n != name}, "extra": tensor})
    with pytest.raises(ValueError, match=f"{name} has shape"):
        engine.load(9, {**tensors, name: tensor[:1]})
    assert (engine.version, greedy(engine, PROMPTS)) == (version, before)


def test_what_can_never_be_served_is_refused_with_the_numbers(
    engine: Engine, start: Callable[..., Engine], checkpoint: Path
) -> None:
    def refused(generation: Generation, message: str, by: Engine = engine) -> None:
        with pytest.raises(ValueError, match=message):
            by.submit(generation, lambda generated: None)

    refused(Generation("x", [1] * 500, Sampling(1.0, 13)), rf"500 tokens and 13 new ones make 513.* {POSITIONS}")
    refused(Generation("x", [], Sampling()), "the prompt is empty")
    refused(Generation("x", [1, VOCABULARY], Sampling()), f"token id {VOCABULARY} is not within 0 to 59")
    refused(Generation("x", [1, -1], Sampling()), "token id -1")
    refused(Generation("x", [1], Sampling(temperature=-1.0)), "temperature -1.0")
    refused(Generation("x", [1], Sampling(), [2, 3], [-1.0]), "2 prefix ids, but 1 prefix logprobs")
    small = start(checkpoint, kv_tokens=64)
    refused(Generation("x", [1] * 40, Sampling(1.0, 25)), "make 65, the KV cache holds 64", small)
    assert len(generate(small, [Generation("x", [1] * 40, Sampling(1.0, 24))])[0].ids) == 24


def test_two_requests_cannot_run_under_one_id(engine: Engine, answers: Answers) -> None:
    engine.submit(Generation("twin", PROMPTS[0], Sampling(1.0, 400)), answers)
    with pytest.raises(ValueError, match="twin is running already"):
        engine.submit(Generation("twin", PROMPTS[1], Sampling(1.0, 4)), answers)
    engine.abort("twin")
    answers.wait(["twin"])


def test_a_prompt_longer_than_one_forward_pass_is_served(
    start: Callable[..., Engine], checkpoint: Path, engine: Engine
) -> None:
    narrow = start(checkpoint, max_batch_tokens=32)
    prompts = [*PROMPTS, LONG_PROMPT, LONG_PROMPT[::-1]]
    assert greedy(narrow, prompts) == greedy(engine, prompts)


def test_requests_that_do_not_fit_the_cache_together_get_the_same_answers(
    start: Callable[..., Engine], checkpoint: Path, engine: Engine
) -> None:
    small = start(checkpoint, kv_tokens=256)
    prompts = [prompt[:20] for prompt in PROMPTS]
    assert greedy(small, prompts, 100) == greedy(engine, prompts, 100)
    gauges = small.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_used, gauges.kv_total) == (0, 0, 0, 256)


def test_requests_put_back_for_want_of_cache_go_on_when_the_running_ones_are_aborted(
    start: Callable[..., Engine], checkpoint: Path, answers: Answers
) -> None:
    small = start(checkpoint, kv_tokens=256)
    ids = [f"f{i}" for i in range(6)]
    for id in ids:
        small.submit(Generation(id, PROMPTS[1], Sampling(1.0, 200)), answers)
    wait_until(lambda: small.gauges().running == 1 or len(answers.calls) > 0, "requests put back")
    for id in ids[:3]:
        small.abort(id)
    assert len(answers.wait(ids)) == 6
    assert all(len(answers.calls[id][0].ids) == 200 for id in ids[3:])


def test_gauges_count_what_runs_and_waits(start: Callable[..., Engine], checkpoint: Path, answers: Answers) -> None:
    narrow = start(checkpoint, max_running=2)
    for i in range(5):
        narrow.submit(Generation(f"w{i}", PROMPTS[2], Sampling(1.0, 400)), answers)
    wait_until(lambda: narrow.gauges().running == 2, "two running")
    gauges = narrow.gauges()
    assert gauges.waiting == 3
    assert 0 < gauges.kv_used < gauges.kv_total == 65536
    for i in range(5):
        narrow.abort(f"w{i}")
    answers.wait(f"w{i}" for i in range(5))
    wait_until(lambda: narrow.gauges().kv_used == 0, "the cache is given back")


def test_close_ends_what_runs_with_abort_and_leaves_no_thread(
    start: Callable[..., Engine], checkpoint: Path, answers: Answers
) -> None:
    before = set(threading.enumerate())
    closing = start(checkpoint, max_running=2)
    for i in range(4):
        closing.submit(Generation(f"c{i}", PROMPTS[i], Sampling(1.0, 450)), answers)
    wait_until(lambda: len(closing.progress()) == 2, "tokens of two requests")
    closing.close()
    assert {answer.finish_reason for answer in answers.wait((f"c{i}" for i in range(4)), deadline=0)} == {"abort"}
    assert sum(len(answer.ids) > 0 for answer in answers.wait(f"c{i}" for i in range(4))) == 2
    assert set(threading.enumerate()) <= before
    closing.close()
    with pytest.raises(RuntimeError, match="was not taken: closed"):
        closing.submit(Generation("late", [1], Sampling(1.0, 2)), answers)
    closing.start()
    assert len(greedy(closing, [[1, 2]], 3)[0]) == 3


def test_a_request_to_an_idle_engine_starts_at_once(engine: Engine) -> None:
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        greedy(engine, [[1]], 1)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.08


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'transformers'"):
        create_engine("transfomers", "somewhere")
