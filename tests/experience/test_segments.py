"""The files: whole or not there, in order, and once, wherever the writer died."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest

from laminar.errors import LaminarError, UserError
from laminar.experience.segments import Segments
from laminar.experience.store import Store
from tests.experience.stores import full_disk

SCHEMA = pa.schema([("n", pa.int64())])


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": numbers}, schema=SCHEMA)


def opened(url: str | Path) -> tuple[Segments, list[int]]:
    """Taken over, as after a crash, and the rows found."""
    store = Store(str(url))
    store.create(["rows/segments", "rows/parts"])
    segments = Segments(store, "rows", SCHEMA)
    return segments, [n for _, table in segments.recover(["n"], epoch="1") for n in table["n"].to_pylist()]


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def test_rows_are_found_again_in_order_across_compactions(url: str) -> None:
    segments, _ = opened(url)
    for n in range(5):
        segments.append(batch(n))
    part = segments.compact(3)
    assert (part.first, part.last) == (1, 3)
    segments.forget(3)
    segments.append(batch(5))
    again, rows = opened(url)
    assert rows == [0, 1, 2, 3, 4, 5]
    assert again.loose == 3
    assert again.append(batch(6)).first == 7


def test_who_listed_the_files_before_a_compaction_can_read_them_after_it(url: str) -> None:
    seconds = 0.0
    opened(url)
    segments = Segments(Store(url), "rows", SCHEMA, clock=lambda: seconds)
    for n in range(16):
        segments.append(batch(n))
    listed = segments.files()
    for _ in range(8):
        segments.compact(2)
        segments.forget(2)
    parts = segments.files()
    merged = segments.merge()
    assert merged is not None
    segments.forget_covered(merged)
    for files in (listed, parts, segments.files()):
        assert [n for file in files for n in segments.read(file)["n"].to_pylist()] == list(range(16))
    seconds = 11.0  # only then are they deleted, with the next to go
    segments.append(batch(16))
    segments.compact(1)
    segments.forget(1)
    assert segments.store.names("rows/parts") == [file.name.rpartition("/")[2] for file in segments.files()]
    assert len(segments.store.names("rows/segments")) == 1
    segments.close()
    assert segments.store.names("rows/segments") == []


def test_a_crash_between_compacting_and_deleting_shows_no_row_twice(url: str) -> None:
    segments, _ = opened(url)
    for n in range(4):
        segments.append(batch(n))
    segments.compact(3)
    assert [file.part for file in segments.files()] == [True, False]  # as a reader sees it, before any recovery
    again, rows = opened(url)
    assert rows == [0, 1, 2, 3]
    assert len(again.store.names("rows/segments")) == 1


def test_a_half_written_file_is_swept_and_never_seen(tmp_path: Path) -> None:
    """prime-rl #1712: a resume read what was half written."""
    segments, _ = opened(tmp_path)
    segments.append(batch(1))
    (tmp_path / "rows/segments/000000000002.1.arrow.tmp").write_bytes(b"half")
    (tmp_path / "rows/parts/000000000001-000000000001.parquet.tmp").write_bytes(b"half")
    assert [file.first for file in segments.files()] == [1]
    _, rows = opened(tmp_path)
    assert rows == [1]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("keep", [0, 1, 200])
def test_a_torn_last_segment_is_set_aside_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int) -> None:
    segments, _ = opened(tmp_path)
    for n in range(3):
        segments.append(batch(n))
    last = tmp_path / "rows/segments/000000000003.1.arrow"
    last.write_bytes(last.read_bytes()[:keep])
    with caplog.at_level(logging.WARNING):
        again, rows = opened(tmp_path)
    assert rows == [0, 1]
    assert "000000000003.1.arrow is torn" in caplog.text
    again.append(batch(9))
    assert opened(tmp_path)[1] == [0, 1, 9]


def test_a_damaged_file_before_the_last_is_an_error_that_names_it(tmp_path: Path) -> None:
    segments, _ = opened(tmp_path)
    for n in range(2):
        segments.append(batch(n))
    (tmp_path / "rows/segments/000000000001.1.arrow").write_bytes(b"")
    with pytest.raises(LaminarError, match=r"000000000001.1.arrow is damaged .*move it away to go on"):
        opened(tmp_path)


def test_a_damaged_part_is_an_error_and_its_segments_are_not_deleted(tmp_path: Path) -> None:
    segments, _ = opened(tmp_path)
    for n in range(2):
        segments.append(batch(n))
    segments.compact(2)
    part = tmp_path / "rows/parts/000000000001-000000000002.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(LaminarError, match=r"000000000002.parquet is damaged"):
        opened(tmp_path)
    part.unlink()
    assert opened(tmp_path)[1] == [0, 1]


def test_single_rows_are_read_from_segments_and_from_parts(url: str) -> None:
    segments, _ = opened(url)
    numbers = list(range(1000))
    first = segments.append(batch(*numbers))
    second = segments.append(batch(*range(1000, 1010)))
    assert segments.read_rows(second, [9, 0])["n"].to_pylist() == [1009, 1000]
    part = segments.compact(2)
    wanted = [1009, 3, 255, 256, 700, 3]
    assert segments.read_rows(part, wanted)["n"].to_pylist() == wanted
    assert segments.read(first).num_rows == 1000


def test_a_store_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        opened(tmp_path / "file" / "run")
    assert str(error.value) == (
        f"cannot write to {tmp_path}/file/run: Not a directory; give a store that can be written"
    )


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "sftp://host/run"])
def test_an_unknown_protocol_or_a_missing_driver_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match=f"cannot use the store {url}: "):
        opened(url)


def test_a_full_disk_names_the_store_and_the_append_can_be_repeated() -> None:
    with full_disk() as disk:
        segments, _ = opened(disk.url)
        segments.append(batch(1))
        disk.room = 0
        with pytest.raises(LaminarError, match=f"cannot write to {disk.url}: No space left on device; "):
            segments.append(batch(2))
        disk.room = 100
        segments.append(batch(3))
        assert opened(disk.url)[1] == [1, 3]


def test_a_full_disk_is_found_when_the_store_is_opened() -> None:
    with full_disk() as disk:
        disk.room = 0
        with pytest.raises(UserError, match="No space left on device; give a store that can be written"):
            opened(disk.url)


def test_parts_of_one_size_are_merged_and_every_row_is_there_in_order(url: str) -> None:
    segments, _ = opened(url)
    for n in range(20):
        segments.append(batch(n))
        segments.compact(1)
        segments.forget(1)
        while merged := segments.merge():
            assert opened(url)[1] == list(range(n + 1))  # as after a crash before the files it covers are deleted
            segments.forget_covered(merged)
    assert opened(url)[1] == list(range(20))
    assert 2 <= len(segments.files()) <= 6


def test_what_a_fenced_writer_put_down_last_is_void_once_the_new_one_writes(tmp_path: Path) -> None:
    old, _ = opened(tmp_path)
    old.append(batch(1))
    store = Store(str(tmp_path))
    new = Segments(store, "rows", SCHEMA)
    assert [n for _, table in new.recover(["n"], epoch="2") for n in table["n"].to_pylist()] == [1]
    old.append(batch(98))
    new.append(batch(2))
    assert [n for file in new.files() for n in new.read(file)["n"].to_pylist()] == [1, 2]
    assert opened(tmp_path)[1] == [1, 2]
    assert len(list((tmp_path / "rows/segments").iterdir())) == 2


def test_a_listing_taken_during_a_merge_is_taken_again(tmp_path: Path) -> None:
    segments, _ = opened(tmp_path)
    for n in range(3):
        segments.append(batch(n))
    complete, calls = segments.store.names, []

    def names(folder: str) -> list[str]:
        calls.append(folder)
        return complete(folder)[1:] if len(calls) <= 1 else complete(folder)

    segments.store.names = names  # type: ignore[method-assign]
    assert [file.first for file in segments.files()] == [1, 2, 3]
