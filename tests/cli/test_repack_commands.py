"""What the commands around repack refuse, in one line."""

from __future__ import annotations

import pytest

from laminar.cli.app import run_app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "rollout", "--paper"], "has no --paper"),
        (["bench", "repack", "--only", "512"], "add --paper"),
        (["bench", "repack", "--paper", "--only", "7"], "has no part 7; there are: 256, 512"),
        (["repack", "nothing", "--from", "rollout-0", "--store", "/nonexistent"], "there is no run"),
        (["drain", "nothing", "rollout-0", "--store", "/nonexistent"], "there is no run"),
        (["repack", "nothing"], "--from"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_app(arguments) == 2
    said = capfd.readouterr().err.strip()
    assert message in said and len(said.splitlines()) == 1
