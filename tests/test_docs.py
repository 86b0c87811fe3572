"""What README and CONTRIBUTING say holds: their flow, commands, benches, SQL and files are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from laminar.bench import BENCHES
from laminar.cli.app import run_app
from laminar.experience.reader import Experience
from laminar.experience.store import Store
from tests.live import ROOT

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
FLOW = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "@lm.flow" in block)
SQL = re.findall(
    r'(?:query latest|\.query\() ?"(select [^"]+)"', README + (ROOT / "flows" / "quickstart.py").read_text()
)
FILES = sorted(set(re.findall(r"`([\w./]+\.(?:py|md))`", CONTRIBUTING + README)))
HOMES = ("", "laminar", "laminar/experience", "plugins/laminar_dask", "tests")
"""Where a path in the documents may begin: each table says of which folder it speaks."""


def test_the_flow_of_the_readme_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    monkeypatch.chdir(ROOT)
    assert run_app(["check", str(tmp_path / "flow.py"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["derived"]["post_train"]["samples per prompt"] == 8


def test_the_commands_and_benches_of_the_readme_are_those_that_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"^\| `laminar-flow (\w+)", README, re.MULTILINE)) | {"drain"}
    assert run_app(["--help"]) == 0
    listed = set(re.findall(r"^\W*([a-z]+) {2,}[A-Z]", capfd.readouterr().out, re.MULTILINE))
    assert named == listed
    line = next(line for line in README.splitlines() if line.startswith("| `laminar-flow bench"))
    assert set(re.findall(r"`(\w+)`", line.partition("limit")[2])) == set(BENCHES)


@pytest.mark.parametrize("sql", SQL)
def test_the_sql_of_the_readme_is_about_columns_that_there_are(sql: str, tmp_path: Path) -> None:
    Store(f"{tmp_path}/experience").create(["segments"])
    assert Experience(str(tmp_path)).query(sql) is not None


def test_there_is_sql_to_look_at() -> None:
    assert len(SQL) >= 5


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_documents_name_is_there(name: str) -> None:
    assert any((ROOT / home / name).is_file() for home in HOMES)
