"""The remaining-length estimate, against lengths that it has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from laminar.rollout.lengths import Lengths, Survival

CAP = 16384
GROUP = 16


def draw(groups: int, likeness: float, seed: int) -> np.ndarray:
    """Log-normal lengths, one row a group; siblings alike to that degree."""
    rng = np.random.default_rng(seed)
    shared, own = rng.normal(size=(groups, 1)), rng.normal(size=(groups, GROUP))
    normal = np.sqrt(likeness) * shared + np.sqrt(1 - likeness) * own
    return np.clip(np.exp(7.9 + 0.65 * normal), 1, CAP - 1)


def learn(lengths: Lengths, rows: np.ndarray, prefix: str) -> None:
    for number, row in enumerate(rows):
        for length in sorted(row):
            lengths.finished(f"{prefix}{number}", int(length), group_size=len(row))


@pytest.mark.parametrize("generated", [0, 1000, 4000, 8000])
def test_quantiles_hold_for_held_out_lengths(generated: int) -> None:
    lengths = Lengths(CAP)
    learn(lengths, draw(200, 0.0, 1), "g")
    held_out = draw(2000, 0.0, 2).ravel()
    survivors = held_out[held_out > generated]
    survival = lengths.survival()
    at = np.array([float(generated)])
    for level in (0.25, 0.5, 0.9):
        bound = generated + float(survival.quantile(level, at)[0])
        assert np.mean(survivors <= bound) == pytest.approx(level, abs=0.06)
    expected = float(survival.remaining(at)[0])
    assert expected == pytest.approx(float(np.mean(survivors - generated)), rel=0.12)


def test_the_first_to_finish_do_not_make_all_look_short() -> None:
    lengths, truth = Lengths(CAP), draw(100, 0.0, 3).ravel()
    now = np.quantile(truth, 0.3)
    for number, length in enumerate(truth[truth <= now]):
        lengths.finished(f"g{number}", int(length))
    running = np.full(int((truth > now).sum()), now)
    naive, censored = lengths.survival(), lengths.survival(running)
    assert float(censored.at(np.array([now]))[0]) == pytest.approx(0.7, abs=0.03)
    assert float(naive.at(np.array([now]))[0]) < 0.05


def test_without_data_the_cap_is_assumed() -> None:
    remaining = Lengths(CAP).survival().remaining(np.array([0.0, 4000.0]))
    assert remaining == pytest.approx([CAP, CAP - 4000], rel=0.01)


@pytest.mark.parametrize(("likeness", "better"), [(0.6, 0.90), (0.0, 1.03)])
def test_finished_siblings_help_as_far_as_siblings_are_alike(likeness: float, better: float) -> None:
    lengths = Lengths(CAP)
    learn(lengths, draw(300, likeness, 4), "past")
    assert lengths.likeness() == pytest.approx(likeness, abs=0.08)
    with_siblings, without = [], []
    for number, row in enumerate(draw(150, likeness, 5)):
        row = np.sort(row)
        for length in row[: GROUP // 2]:
            lengths.finished(f"now{number}", int(length), group_size=GROUP)
        rest, generated = row[GROUP // 2 :], float(row[GROUP // 2 - 1])
        survival, at = lengths.survival(), np.full(GROUP // 2, generated)
        factor = lengths.factors([f"now{number}"], GROUP)[0]
        for factors, errors in ((factor, with_siblings), (1.0, without)):
            guess = generated + survival.quantile(0.5, at, factors)
            errors += list(np.abs(np.log(guess) - np.log(rest)))
    assert np.mean(with_siblings) < better * np.mean(without)


def test_a_survival_curve_gives_the_mean_of_what_is_left() -> None:
    even = Survival(width=1.0, share=np.linspace(1.0, 0.0, 101))
    assert even.remaining(np.array([0.0, 40.0])) == pytest.approx([50.0, 30.0])
    assert even.quantile(0.5, np.array([40.0])) == pytest.approx([30.0])
