"""The run store: small files written whole, runs found again, one line where it cannot be written."""

from __future__ import annotations

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laminar as lm
from laminar.errors import UserError
from laminar.flow.context import RunContext, new_run_id
from laminar.flow.plain import as_plain
from laminar.flow.store import RunFolder, find_run, list_runs


def make_run(store, flow, run_id, started, **record):
    context = RunContext.of(str(store), flow, run_id)
    base = {"run_id": run_id, "flow": flow, "status": "finished", "started": started, "parameters": {}}
    return RunFolder.create(context, {**base, **record})


@pytest.fixture
def store(tmp_path):
    make_run(tmp_path, "demo", "20300101-0900-aaaa", "2030-01-01T09:00")
    make_run(tmp_path, "demo", "20300101-0900-bbbb", "2030-01-01T09:01")
    make_run(tmp_path, "other", "20300102-0900-aaaa", "2030-01-02T09:00")
    return str(tmp_path)


def test_runs_are_listed_in_order_of_time(store):
    assert [run["run_id"][-6:] for run in list_runs(store)] == ["0-aaaa", "0-bbbb", "0-aaaa"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("latest", "other/20300102-0900-aaaa"),
        ("20300102", "other/20300102-0900-aaaa"),
        ("20300101-0900-b", "demo/20300101-0900-bbbb"),
    ],
)
def test_a_run_is_found_by_the_beginning_of_its_id(store, name, found):
    assert find_run(name, store) == f"{store}/{found}"
    assert lm.open_run(find_run(name, store)).url == f"{store}/{found}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("20300101", "2 runs in .* begins with '20300101'; the newest are 20300102-0900-aaaa"),
        ("nope", "no run in .* begins with 'nope'"),
        ("some/folder", "some/folder is not a run's folder"),
    ],
)
def test_a_run_that_is_not_meant_clearly_is_one_line(store, name, message):
    with pytest.raises(UserError, match=message):
        find_run(name, store)


def test_an_empty_store_says_so(tmp_path):
    with pytest.raises(UserError, match="there is no run in the store"):
        lm.open_run("latest", store=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("{tmp}/file/runs", "Not a directory|File exists"),
        ("/proc/nowhere/runs", "No such file|cannot"),
        ("nosuch://lab/runs", "Protocol not known"),
    ],
)
def test_a_store_that_cannot_be_written_is_one_line_with_its_url_and_the_reason(tmp_path, store, reason):
    (tmp_path / "file").write_text("")
    url = store.format(tmp=tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        make_run(url, "demo", "r1", "2030")
    assert url in str(caught.value) and "\n" not in str(caught.value) and "--store" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"run_id": "r"}'])
def test_a_damaged_record_hides_no_other_run(store, text):
    (Path(store) / "demo" / "20300101-0900-aaaa" / "run.json").write_text(text)
    runs = list_runs(store)
    assert [run["status"] for run in runs] == ["damaged", "finished", "finished"]
    assert (runs[0]["flow"], runs[0]["url"]) == ("demo", f"{store}/demo/20300101-0900-aaaa")
    assert find_run("latest", store).endswith("20300102-0900-aaaa")
    with pytest.raises(UserError, match=r"demo/20300101-0900-aaaa/run.json "):
        lm.open_run("20300101-0900-a", store)


def test_a_run_in_a_store_that_cannot_be_read_is_one_line():
    with pytest.raises(UserError, match=r"nosuch://a/b/run.json cannot be read: Protocol not known: nosuch"):
        find_run("nosuch://a/b")


def test_of_several_runs_of_one_id_at_once_one_gets_it(tmp_path):
    barrier = threading.Barrier(8)

    def start(number: int) -> bool:
        barrier.wait(timeout=30)
        try:
            make_run(tmp_path, "demo", "r1", "2030", number=number)
        except UserError as error:
            assert "there is a run r1 already" in str(error)
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(start, range(8))) == 1


def test_a_file_that_could_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        make_run(tmp_path, "demo", "r1", "2030")
    monkeypatch.undo()
    assert not list((tmp_path / "demo").iterdir())
    make_run(tmp_path, "demo", "r1", "2030")


def test_a_run_id_is_not_used_twice(store):
    with pytest.raises(UserError, match="there is a run 20300101-0900-aaaa already"):
        make_run(store, "demo", "20300101-0900-aaaa", "2030")


@pytest.mark.parametrize("run_id", ["", "a/b", "..", "x" * 65, "ä"])
def test_a_run_id_that_cannot_be_a_folder_is_refused(run_id):
    with pytest.raises(UserError, match="run id"):
        RunContext.of("runs", "demo", run_id)


def test_run_ids_are_unique_and_in_order_of_time():
    start = datetime(2030, 1, 1, tzinfo=UTC)
    ids = [new_run_id(start + timedelta(minutes=n)) for n in range(200)]
    assert ids == sorted(ids) and len({new_run_id(start) for _ in range(200)}) > 190


def test_a_summary_grows_and_nothing_half_written_is_left(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    folder.update_summary({"steps": 1, "reward": float("nan")})
    folder.update_summary({"steps": 2})
    assert folder.read_json("summary.json") == {"steps": 2, "reward": None}
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["summary.json"]


def test_a_running_run_whose_process_is_gone_is_lost(tmp_path):
    gone = {"status": "running", "host": socket.gethostname(), "pid": 2**22 + 1}
    make_run(tmp_path, "demo", "r1", "2030", **gone)
    make_run(tmp_path, "demo", "r2", "2031", **{**gone, "pid": os.getpid()})
    assert [lm.open_run(r, store=str(tmp_path)).status for r in ("r1", "r2")] == ["lost", "running"]


def test_another_process_of_the_same_number_does_not_keep_a_run_alive(tmp_path):
    import psutil

    mine = {"status": "running", "host": socket.gethostname(), "pid": os.getpid()}
    started = psutil.Process().create_time()
    make_run(tmp_path, "demo", "r1", "2030", **mine, process_started=started)
    make_run(tmp_path, "demo", "r2", "2031", **mine, process_started=started - 3600)
    assert [lm.open_run(r, store=str(tmp_path)).status for r in ("r1", "r2")] == ["running", "lost"]


def test_an_opened_run_shows_itself_in_a_notebook(store):
    assert "<td>finished</td>" in lm.open_run("latest", store)._repr_html_()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.builds(object),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(values)
def test_anything_becomes_strict_json(value):
    json.dumps(as_plain(value), allow_nan=False)
