"""Generated problems: seeds that share nothing, the package's own scores, and clear words for a wrong name."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.environments import reasoning_gym
from laminar.environments.reasoning_gym import base_seed
from laminar.errors import UserError

LARGE = {"min_terms": 4, "max_terms": 6, "min_digits": 3, "max_digits": 4}


def test_seeds_share_no_problem() -> None:
    texts = []
    for seed in range(4):
        sums = reasoning_gym("chain_sum", seed=seed, size=400, **LARGE)
        texts += [sums.prompt(index).text for index in range(400)]
    assert len(set(texts)) == len(texts)


@given(st.sampled_from(["chain_sum", "maze"]), st.integers(-(2**40), 2**40), st.integers(1, 5000))
def test_seeds_thousands_apart_stay_clear_of_each_others_problems(name: str, seed: int, further: int) -> None:
    one, other = base_seed(name, seed), base_seed(name, seed + further)
    assert 0 <= one < 2**31
    assert min((one - other) % 2**31, (other - one) % 2**31) > 100_000


def test_a_problem_depends_only_on_its_index() -> None:
    first, second = (reasoning_gym("chain_sum", seed=3, **LARGE) for _ in range(2))
    backwards = [second.prompt(index) for index in reversed(range(20))]
    assert [first.prompt(index) for index in range(20)] == backwards[::-1]
    assert len(first) == 100_000
    assert first.prompt(99_999).id == "chain_sum-99999"
    with pytest.raises(IndexError, match="prompt 100000 of `chain_sum`, which has 100000"):
        first.prompt(100_000)


def test_partial_credit_is_kept_and_the_tagged_answer_is_what_counts() -> None:
    sums = reasoning_gym("chain_sum", **LARGE)
    prompt = sums.prompt(0)
    answer = prompt.row["answer"]
    assert sums.score(prompt, f"working: 1+1 <answer>{answer}</answer>").reward == 1.0
    assert 0 < (sums.score(prompt, f"it is {answer}").reward or 0.0) < 1
    assert sums.score(prompt, "no idea").reward == 0.0


def test_an_answer_that_the_packages_scorer_breaks_on_gets_zero_and_is_told() -> None:
    factors = reasoning_gym("prime_factorization", size=10)
    score = factors.score(factors.prompt(0), "no idea")
    assert (score.reward, score.status) == (0.0, "ok")
    assert "could not read the answer: ValueError" in score.message


def test_an_environment_travels_small_and_generates_the_same_elsewhere() -> None:
    sums = reasoning_gym("chain_sum", size=50, seed=5, **LARGE)
    before = sums.prompt(7)
    packed = pickle.dumps(sums)
    assert len(packed) < 1000
    assert pickle.loads(packed).prompt(7) == before
    assert pickle.loads(packed).fingerprint() == sums.fingerprint()


def test_fingerprints_tell_seeds_sizes_and_settings_apart() -> None:
    made = [
        reasoning_gym("chain_sum"),
        reasoning_gym("chain_sum", seed=1),
        reasoning_gym("chain_sum", size=10),
        reasoning_gym("chain_sum", max_terms=3),
        reasoning_gym("products"),
    ]
    assert len({environment.fingerprint() for environment in made}) == len(made)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "no data set 'chain_sums'; did you mean 'chain_sum'?"),
        ("zzzzz", {}, "no data set 'zzzzz'; there are 1"),
        ("chain_sum", {"min_term": 2}, "no setting 'min_term'; it has .*; did you mean 'min_terms'?"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms; got {'min_terms': 5"),
        ("chain_sum", {"min_terms": "two"}, "got {'min_terms': 'two'}"),
        ("chain_sum", {"size": 0}, "size=0; expected at least 1"),
        ("chain_sum", {"seed": 0.5}, "seed=0.5; expected a whole number"),
    ],
)
def test_a_wrong_name_or_setting_is_told_with_the_nearest(name: str, config: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")) as raised:
        reasoning_gym(name, **config)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_every_data_set_of_the_package_generates_and_scores() -> None:
    from reasoning_gym.factory import DATASETS

    for name in sorted(set(DATASETS) - {"composite"}):
        problems = reasoning_gym(name, size=2)
        prompt = problems.prompt(1)
        pickle.dumps(prompt)
        assert prompt.text
        assert problems.score(prompt, "((no answer").reward is not None, name
        if prompt.row["answer"] is not None:
            assert problems.score(prompt, prompt.row["answer"]).reward == 1.0, name
