"""Every flow that we ship starts as it is (AReaL #1330)."""

from __future__ import annotations

import json

import pytest

from laminar.cli.app import run_app
from tests.live import ROOT

FLOWS = sorted(path.name for path in (ROOT / "flows").glob("*.py") if "@lm.flow" in path.read_text())


def test_there_are_flows() -> None:
    assert "quickstart.py" in FLOWS


@pytest.mark.parametrize("name", FLOWS)
def test_a_shipped_flow_passes_its_check_with_its_defaults(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_app(["check", str(ROOT / "flows" / name), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["status"] == "ok" and found["derived"]
