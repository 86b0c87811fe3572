"""Metrics are Parquet files that anyone can read at any moment."""

from __future__ import annotations

import threading
from pathlib import Path

import duckdb
import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from laminar.watch.metrics import MetricsWriter, read_metrics


def parts(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "metrics").iterdir())


def test_rows_come_back_in_order_with_the_union_of_their_columns(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    writer.write("steps", {"step": 1, "loss": 0.5})
    writer.flush()
    writer.write("steps", {"step": 2, "loss": 1, "entropy": 0.1})
    writer.write("steps", {"step": 3, "note": None})
    writer.close()
    rows = read_metrics(str(tmp_path), "steps").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == [0.5, 1.0, None]
    assert [row["entropy"] for row in rows] == [None, 0.1, None]
    assert all(row["time"] > 1e9 for row in rows)


def test_a_run_without_metrics_reads_as_no_rows(tmp_path: Path) -> None:
    assert read_metrics(str(tmp_path / "nothing"), "steps").num_rows == 0
    MetricsWriter(str(tmp_path)).close()
    assert read_metrics(str(tmp_path), "steps").num_rows == 0


def test_numbering_goes_on_after_a_restart_of_the_writer(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        writer = MetricsWriter(str(tmp_path))
        writer.write("steps", {"step": step})
        writer.close()
    assert parts(tmp_path) == [f"steps-{number:05d}.parquet" for number in (1, 2, 3)]
    assert read_metrics(str(tmp_path), "steps")["step"].to_pylist() == [1, 2, 3]


def test_rows_are_flushed_by_count_and_by_age(tmp_path: Path) -> None:
    now = [100.0]
    writer = MetricsWriter(str(tmp_path), every_rows=3, every_seconds=5.0, clock=lambda: now[0])
    writer.write("steps", {"step": 1})
    writer.write("replicas", {"name": "a"})
    assert parts(tmp_path) == []
    writer.write("steps", {"step": 2})
    writer.write("steps", {"step": 3})
    assert parts(tmp_path) == ["steps-00001.parquet"]
    now[0] += 6.0
    writer.write("replicas", {"name": "b"})
    assert parts(tmp_path) == ["replicas-00001.parquet", "steps-00001.parquet"]


def test_no_reader_ever_sees_half_a_file(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path), every_rows=1)
    done = threading.Event()

    def write() -> None:
        for step in range(60):
            writer.write("steps", {"step": step, "text": "x" * 5000})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    looks = 0
    while not done.is_set():
        for path in (tmp_path / "metrics").glob("steps-*.parquet"):
            assert pq.read_table(path).num_rows == 1
            looks += 1
    thread.join(timeout=30)
    assert looks > 0
    assert read_metrics(str(tmp_path), "steps")["step"].to_pylist() == list(range(60))


def test_what_a_killed_writer_left_half_written_is_not_read(tmp_path: Path) -> None:
    MetricsWriter(str(tmp_path)).close()
    (tmp_path / "metrics" / "steps-00001.parquet.tmp").write_bytes(b"PAR1 and then it died")
    writer = MetricsWriter(str(tmp_path))
    writer.write("steps", {"step": 1})
    writer.close()
    assert parts(tmp_path) == ["steps-00001.parquet"]
    assert read_metrics(str(tmp_path), "steps").num_rows == 1


def test_scalars_of_numpy_and_nested_values_are_kept(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    writer.write("events", {"loss": np.float32(0.5), "n": np.int64(3), "sizes": {"a": [1, 2]}, "path": Path("x")})
    writer.close()
    row = read_metrics(str(tmp_path), "events").to_pylist()[0]
    assert (row["loss"], row["n"], row["sizes"], row["path"]) == (0.5, 3, '{"a": [1, 2]}', "x")


def test_a_column_that_changes_its_type_is_refused_by_name_and_spoils_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    writer.write("steps", {"step": 1, "loss": 0.5})
    with pytest.raises(TypeError, match=r"steps\.loss was a number, now it is text: 'nan'"):
        writer.write("steps", {"step": 2, "loss": "nan"})
    writer.close()
    assert read_metrics(str(tmp_path), "steps")["step"].to_pylist() == [1]


def test_a_kind_that_would_leave_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower-case name"):
        MetricsWriter(str(tmp_path)).write("../steps", {"step": 1})


def test_metrics_work_on_any_fsspec_store() -> None:
    url = "memory://laminar-test-metrics/run"
    writer = MetricsWriter(url)
    writer.write("steps", {"step": 1})
    writer.close()
    try:
        assert read_metrics(url, "steps")["step"].to_pylist() == [1]
    finally:
        fsspec.filesystem("memory").rm("/laminar-test-metrics", recursive=True)


def test_sql_reads_the_parts_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path), every_rows=1)
    writer.write("steps", {"step": 1, "loss": 2.0})
    writer.write("steps", {"step": 2, "loss": 1.0, "entropy": 0.5})
    files = f"read_parquet('{tmp_path}/metrics/steps-*.parquet', union_by_name=true)"
    assert duckdb.sql(f"select max(step), min(loss), max(entropy) from {files}").fetchall() == [(2, 1.0, 0.5)]
