"""Names of what travels: they are the same wherever a trajectory goes, and no two are alike."""

from __future__ import annotations

from dataclasses import replace

from laminar.trajectory import Prompt, Sampling, TrajectoryRequest


def test_a_trajectory_keeps_its_key_and_shares_it_with_no_other() -> None:
    one = TrajectoryRequest(
        run="r1",
        group="g000007",
        sample=2,
        group_size=4,
        prompt=Prompt("sum-7", "1+1="),
        prompt_ids=(1, 2),
        sampling=Sampling(),
        environment="e",
    )
    assert (one.id, one.key) == ("g000007-2", "rollout-r1-g000007-2")
    assert replace(one, queued_at=5.0, at_least=3).key == one.key
    others = [
        replace(one, **change) for change in ({"run": "r2"}, {"group": "g8"}, {"sample": 3}, {"purpose": "evaluate"})
    ]
    assert len({one.key, *(other.key for other in others)}) == 5
    assert others[-1].key.startswith("evaluate-")
