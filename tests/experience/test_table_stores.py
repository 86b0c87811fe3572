"""Stores that are full, read only or gone: one line, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from laminar.errors import LaminarError, UserError
from laminar.experience.store import StoreError
from laminar.experience.table import ExperienceTable
from tests.experience.rows import group, lease
from tests.experience.stores import full_disk


def test_a_full_disk_refuses_the_work_and_loses_nothing_acknowledged() -> None:
    with full_disk() as disk:
        table = ExperienceTable(disk.url)
        table.append(group("g0"))
        held = lease(table)
        disk.room = 0
        with pytest.raises(LaminarError, match="No space left on device"):
            table.append(group("g1"))
        with pytest.raises(LaminarError, match="No space left on device"):
            table.commit(held.id, step=1, version=0)
        assert (table.counts()["rows"], table.trained_rows()) == (2, 0)
        disk.room = 100
        table.commit(held.id, step=1, version=0)
        assert table.append(group("g1")) == ["g1-0", "g1-1"]
        again = ExperienceTable(disk.url)
        assert (again.counts()["rows"], again.trained_rows(), again.ready_groups()) == (4, 2, 1)


def test_a_verdict_that_could_not_be_written_comes_again() -> None:
    with full_disk() as disk:
        table = ExperienceTable(disk.url)
        last = group("g0", size=1)
        disk.room = 1
        with pytest.raises(LaminarError, match="No space left on device"):
            table.append(last)
        disk.room = 100
        assert table.append(last) == []
        assert ExperienceTable(disk.url).counts()["evicted_too_few_rows"] == 1


def test_a_store_that_vanishes_is_one_line_and_when_it_is_back_nothing_is_missing(tmp_path: Path) -> None:
    table = ExperienceTable(str(tmp_path / "run"))
    table.append(group("g0"))
    held = lease(table)
    (tmp_path / "run").rename(tmp_path / "away")
    for work in (
        lambda: table.append(group("g1")),
        lambda: table.commit(held.id, step=1, version=0),
        lambda: lease(table),
    ):
        with pytest.raises(StoreError) as error:
            work()
        assert str(error.value).startswith(str(tmp_path / "run/experience")) and "\n" not in str(error.value)
    (tmp_path / "away").rename(tmp_path / "run")
    table.commit(held.id, step=1, version=0)
    assert table.append(group("g1")) == ["g1-0", "g1-1"]
    table.close()
    again = ExperienceTable(str(tmp_path / "run"))
    assert (again.counts()["rows"], again.trained_rows()) == (4, 2)
    again.close()


def test_a_read_only_store_is_one_line_before_anything_starts() -> None:
    with full_disk() as disk:
        disk.refuses = errno.EROFS
        with pytest.raises(UserError, match=f"cannot write to {disk.url}/experience: Read-only file system; give a "):
            ExperienceTable(disk.url)
