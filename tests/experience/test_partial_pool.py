"""The partial-response pool: no token lost, none twice, none of a superseded attempt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import LaminarError, UserError
from laminar.experience import partial_pool
from laminar.experience.partial_pool import PartialPool
from laminar.experience.partials import Partial, Turn
from laminar.experience.store import StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "partials.journal"


def test_a_restarted_pool_has_what_was_streamed(path: Path) -> None:
    """verl #4199: samples in flight were lost on resume."""
    pool = PartialPool(path)
    pool.extend([("g0-0", 1, 7, 0, [5, 6], [-0.5, -0.25]), ("g0-1", 1, 7, 0, [9], [-1.0])])
    pool.extend([("g0-0", 1, 7, 2, [7], [-0.125])])
    pool.drop(["g0-1"])
    again = PartialPool(path)  # the first was never closed: its process died
    assert again.resume("g0-0", 2) == Partial(7, (5, 6, 7), (-0.5, -0.25, -0.125))
    assert again.resume("g0-1", 2) is None


def test_a_superseded_attempt_is_refused_and_counted(path: Path) -> None:
    pool = PartialPool(path)
    pool.extend([("k", 1, 0, 0, [1], [0.0])])
    assert pool.resume("k", 2) == Partial(0, (1,), (0.0,))
    assert pool.extend([("k", 1, 0, 1, [9], [0.0])]) == 0
    assert pool.resume("k", 1) is None
    assert pool.refused == 2
    again = PartialPool(path)
    assert again.extend([("k", 1, 0, 1, [9], [0.0])]) == 0


def test_a_fence_holds_before_the_first_token(path: Path) -> None:
    pool = PartialPool(path)
    assert pool.resume("k", 3) is None
    assert pool.extend([("k", 2, 0, 0, [1], [0.0])]) == 0
    assert pool.extend([("k", 3, 5, 0, [1], [0.0])]) == 1


def test_tokens_that_come_after_the_trajectory_was_stored_are_refused(path: Path) -> None:
    pool = PartialPool(path)
    pool.extend([("k", 1, 0, 0, [1], [0.0])])
    pool.drop(["k", "unknown"])
    assert pool.extend([("k", 1, 0, 1, [2], [0.0])]) == 0
    assert len(pool) == 0
    again = PartialPool(path)
    assert again.extend([("k", 1, 0, 1, [2], [0.0])]) == 0
    assert again.extend([("k", 2, 0, 0, [2], [0.0])]) == 1


def test_a_response_never_has_two_versions_or_a_hole(path: Path) -> None:
    """slime #2092: an aborted response went on under other weights, three versions in one sample."""
    pool = PartialPool(path)
    pool.extend([("k", 1, 4, 0, [1, 2], [0.0, 0.0])])
    assert pool.extend([("k", 2, 5, 2, [3], [0.0])]) == 0
    assert pool.extend([("k", 1, 4, 3, [3], [0.0])]) == 0
    assert pool.extend([("k", 2, 5, 0, [8], [0.0])]) == 1
    assert pool.resume("k", 2) == Partial(5, (8,), (0.0,))


def test_a_torn_journal_gives_what_was_whole_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = PartialPool(path)
    pool.extend([("k", 1, 0, 0, [1, 2], [0.0, 0.0])])
    pool.extend([("k", 1, 0, 2, [3], [0.0])])
    path.write_bytes(path.read_bytes()[:-100])
    assert PartialPool(path).resume("k", 2) == Partial(0, (1, 2), (0.0, 0.0))
    assert "torn at its end" in caplog.text


def test_the_journal_does_not_grow_with_trajectories_that_are_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_pool, "_REWRITE_BYTES", 20_000)
    pool = PartialPool(path)
    pool.extend([("kept", 1, 0, 0, [1], [0.0])])
    for number in range(200):
        pool.extend([(f"k{number}", 1, 0, 0, list(range(100)), [0.0] * 100)])
        pool.drop([f"k{number}"])
    assert path.stat().st_size < 60_000
    assert PartialPool(path).resume("kept", 2) == Partial(0, (1,), (0.0,))


def test_ids_without_logprobs_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="k: 1 logprobs for 2 ids"):
        PartialPool(path).extend([("k", 1, 0, 0, [1, 2], [0.0])])


def test_a_place_that_cannot_be_written_is_one_line(path: Path) -> None:
    path.write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"cannot write partial responses to .*; give a writable run folder"):
        PartialPool(path / "run" / "partials.journal")


def test_a_journal_that_cannot_take_more_is_one_line(path: Path) -> None:
    pool = PartialPool(path)
    pool.close()
    pool._journal._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  (the disk is full from here on)
    with pytest.raises(LaminarError, match="No space left on device"):
        pool.extend([("k", 1, 0, 0, [1], [0.0])])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=20), st.integers(0, 19))
def test_whatever_is_sent_twice_or_out_of_order_is_a_prefix_of_the_response(
    pieces: list[tuple[int, int]], dies_after: int
) -> None:
    import tempfile

    response = list(range(100, 120))
    with tempfile.TemporaryDirectory() as folder:
        pool = PartialPool(Path(folder) / "p")
        reach = 0
        for number, (start, length) in enumerate(pieces):
            ids = response[start : start + length]
            pool.extend([("k", 1, 3, start, ids, [float(-i) for i in ids])])
            reach = max(reach, start + len(ids)) if start <= reach else reach
            if number == dies_after:
                pool = PartialPool(Path(folder) / "p")
        partial = pool.resume("k", 2)
        assert (partial.ids if partial else ()) == tuple(response[:reach])
        assert partial is None or partial.logprobs == tuple(float(-i) for i in response[:reach])


def test_after_a_write_that_failed_the_journal_has_everything_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PartialPool(path)
    pool.extend([("g0-0", 1, 7, 0, [5], [-0.5])])

    with monkeypatch.context() as patch, open("/dev/full", "wb", buffering=0) as full:
        patch.setattr(pool._journal, "_file", full)
        with pytest.raises(LaminarError, match=r"cannot write partial responses .*No space left on device"):
            pool.extend([("g0-0", 1, 7, 1, [6], [-0.25])])
    pool.extend([("g0-0", 1, 7, 1, [6], [-0.25])])
    assert PartialPool(path).resume("g0-0", 2) == Partial(7, (5, 6), (-0.5, -0.25))


STATE = b'{"board": [1, 2]}'


def test_the_state_of_a_turn_is_kept_streamed_and_restored(path: Path) -> None:
    pool = PartialPool(path)
    pool.extend([("k", 1, 7, 0, [5, 6, 7], [-0.5, 0.0, 0.0], (2, 3, STATE))])
    pool.extend([("k", 1, 7, 3, [8], [-0.25])])
    expected = Partial(7, (5, 6, 7, 8), (-0.5, 0.0, 0.0, -0.25), Turn(2, 3, STATE))
    again = PartialPool(path)
    assert again.resume("k", 2) == expected
    again.extend([("k", 2, 7, 4, [9], [0.0], (3, 5, b""))])
    assert PartialPool(path).resume("k", 3) == Partial(7, (5, 6, 7, 8, 9), (*expected.logprobs, 0.0), Turn(3, 5, b""))


def test_a_turn_goes_with_the_tokens_before_it(path: Path) -> None:
    """A state without the tokens that led to it, or the other way round, would go on from another conversation."""
    pool = PartialPool(path)
    pool.extend([("k", 1, 7, 0, [5, 6, 7], [0.0] * 3, (2, 3, STATE))])
    assert pool.extend([("k", 2, 7, 1, [9], [0.0])]) == 0
    assert pool.resume("k", 2) == Partial(7, (5, 6, 7), (0.0,) * 3, Turn(2, 3, STATE))
    assert pool.extend([("k", 2, 8, 0, [1], [0.0])]) == 1
    assert pool.resume("k", 2) == Partial(8, (1,), (0.0,))


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ((2, 4, STATE), "k: turn 2 begins at 4 of 1 tokens"),
        ((2, 1, b"x" * (2 << 20)), "k: the environment's state has 2097152 bytes, at most 1048576 are kept"),
    ],
)
def test_a_turn_that_cannot_be_kept_is_one_line(path: Path, turn: tuple[int, int, bytes], why: str) -> None:
    """NeMo-RL #2917: huge environment states were sent in every step."""
    pool = PartialPool(path)
    with pytest.raises(ValueError, match=why):
        pool.extend([("j", 1, 7, 0, [5], [0.0]), ("k", 1, 7, 0, [5], [0.0], turn)])
    assert len(pool) == 0


def test_beyond_its_budget_it_keeps_a_prefix_and_takes_more_when_others_end(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = PartialPool(path, memory_bytes=20_000)
    thousand = ("long", 1, 7), list(range(1000)), [0.0] * 1000
    for number in range(5):
        (key, run_id, version), ids, logprobs = thousand
        pool.extend([(key, run_id, version, 1000 * number, ids, logprobs)])
    assert pool.nbytes <= 20_000 and pool.overflowed == 3
    assert caplog.text.count("new tokens are not kept until trajectories end") == 1
    assert pool.extend([("other", 1, 7, 0, [1] * 1000, [0.0] * 1000)]) == 0
    resumed = pool.resume("long", 2)
    assert resumed is not None and resumed.ids == tuple(range(1000)) * 2
    pool.drop(["long"])
    assert pool.nbytes == 0
    assert pool.extend([("other", 1, 7, 0, [1] * 1000, [0.0] * 1000)]) == 1


def test_after_a_loss_of_power_what_was_synced_is_there_and_garbage_is_not_taken_for_tokens(path: Path) -> None:
    pool = PartialPool(path)
    pool.extend([("k", 1, 0, 0, [1, 2], [0.0, 0.0])])
    pool.sync()
    synced = path.stat().st_size
    pool.extend([("k", 1, 0, 2, [3] * 50, [0.0] * 50)])
    data = path.read_bytes()
    end = len(data.rstrip(bytes(1)))
    for lost in range(synced, end, 97):  # blocks that never reached the disk are zeros, though the length has
        path.write_bytes(data[:lost] + bytes(len(data) - lost))
        again = PartialPool(path)
        assert again.resume("k", 2) == Partial(0, (1, 2), (0.0, 0.0))
        again.close()


def test_a_sync_that_fails_is_one_line_and_the_journal_begins_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PartialPool(path)
    pool.extend([("k", 1, 0, 0, [1], [0.0])])

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(StoreError, match=r"cannot write partial responses to .*Input/output error"):
            pool.sync()
    before = path.stat().st_ino
    pool.extend([("k", 1, 0, 1, [2], [0.0])])
    assert path.stat().st_ino != before
    assert PartialPool(path).resume("k", 2) == Partial(0, (1, 2), (0.0, 0.0))
