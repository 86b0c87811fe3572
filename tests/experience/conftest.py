"""A table that is opened again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.experience.table import ExperienceTable

Open = Callable[..., ExperienceTable]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """Opens the table of one run, again and again; a table opened before is as good as dead."""
    tables: list[ExperienceTable] = []

    def _open(**options: Any) -> ExperienceTable:
        tables.append(ExperienceTable(str(tmp_path / "run"), **options))
        return tables[-1]

    yield _open
    for table in tables:
        table.close()
