"""The table on S3, by the real protocol: the same promises, also where the store fails, is slow or hangs."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from laminar.errors import LaminarError, UserError
from laminar.experience import store as store_module
from laminar.experience.reader import Experience
from laminar.experience.store import StoreError
from laminar.experience.table import ExperienceTable
from tests.experience.rows import group

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

from tests.experience.s3_server import Faults, s3_server  # noqa: E402  (after it is known that moto is there)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Faults]]:
    with s3_server() as found:
        yield found


@pytest.fixture
def store(server: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Faults]]:
    """The URL of a run in a bucket of its own, and what can be done to its server."""
    import fsspec

    endpoint, faults = server
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    impatient = {"connect_timeout": 1, "read_timeout": 1, "retries": {"max_attempts": 2}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": impatient})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/run", faults
    faults.failing = 0
    faults.pass_others = False
    faults.stuck.set()
    s3fs.S3FileSystem.clear_instance_cache()


def trained(url: str) -> list[int]:
    return Experience(url).query("select count(*) as n from experience where state = 'trained'")["n"].to_pylist()


def test_rows_are_there_after_the_owner_died_and_sql_reads_them(store: tuple[str, Faults]) -> None:
    url, _ = store
    table = ExperienceTable(url, compact_after=3)
    for number in range(7):
        table.append(group(f"g{number}"))
    lease = table.lease(2, version=0, staleness_ceiling=None, lessee="trainer")
    assert lease is not None
    table.commit(lease.id, step=1, version=0)
    table.close()
    again = ExperienceTable(url)
    assert (again.counts()["rows"], again.trained_rows(), again.ready_groups()) == (14, 4, 5)
    assert trained(url) == [4]
    with pytest.raises(LaminarError, match="has a new owner"):
        table.append(group("late"))


def test_a_store_that_fails_now_and_then_is_asked_again(store: tuple[str, Faults]) -> None:
    url, faults = store
    table = ExperienceTable(url)
    faults.failing = 1
    assert table.append(group("g0")) == ["g0-0", "g0-1"]
    table.close()


def test_a_store_that_keeps_failing_is_one_line_and_nothing_acknowledged_is_lost(store: tuple[str, Faults]) -> None:
    url, faults = store
    table = ExperienceTable(url)
    table.append(group("g0"))
    faults.failing = 1000
    with pytest.raises(StoreError) as error:
        table.append(group("g1"))
    assert str(error.value).startswith(f"cannot write to {url}/experience: ") and "\n" not in str(error.value)
    faults.failing = 0
    assert table.append(group("g1")) == ["g1-0", "g1-1"]
    table.close()
    assert ExperienceTable(url).counts()["rows"] == 4


def test_a_store_that_hangs_is_given_up_in_time_and_asked_again_later(
    store: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the driver does: s3fs's read timeout does not end a request on a connection that was used before."""
    url, faults = store
    table = ExperienceTable(url)
    faults.stuck.clear()
    with monkeypatch.context() as impatient:
        impatient.setattr(store_module, "ANSWER_SECONDS", 1.0)
        with pytest.raises(StoreError, match=rf"cannot write to {url}/experience: (no answer within 1 s|.*[Tt]ime)"):
            table.append(group("g0"))
    faults.stuck.set()
    table.append(group("g1"))
    table.close()
    again = ExperienceTable(url)
    assert {"g1-0", "g1-1"} <= again.trajectory_ids()
    again.close()


def test_a_write_that_was_given_up_on_and_comes_late_does_not_replace_a_later_one(
    store: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, faults = store
    table = ExperienceTable(url)
    faults.stuck.clear()
    with monkeypatch.context() as impatient:
        impatient.setattr(store_module, "ANSWER_SECONDS", 1.0)
        with pytest.raises(StoreError, match=r"no answer within|[Tt]ime"):
            table.append(group("late"))
    faults.pass_others = True
    assert table.append(group("g0")) == ["g0-0", "g0-1"]
    faults.stuck.set()  # the first is taken up now
    faults.wait_until_quiet(10.0)
    assert len(table._rows.store.names("rows/segments")) == 2
    assert ExperienceTable(url).trajectory_ids() == {"g0-0", "g0-1"}
    table.close()


def test_a_slow_store_only_takes_longer(store: tuple[str, Faults]) -> None:
    url, faults = store
    table = ExperienceTable(url)
    faults.stuck.clear()
    before = faults.seen
    released = threading.Thread(target=lambda: _release_after_a_request(faults, before), daemon=True)
    released.start()
    assert table.append(group("g0")) == ["g0-0", "g0-1"]
    released.join(10)
    table.close()


def _release_after_a_request(faults: Faults, before: int) -> None:
    pause = threading.Event()
    while faults.seen == before:
        pause.wait(0.01)
    pause.wait(0.3)  # slower than any answer, faster than the deadline
    faults.stuck.set()


def test_a_bucket_that_is_not_there_is_one_line(store: tuple[str, Faults]) -> None:
    with pytest.raises(UserError, match=r"cannot write to s3://no-such-bucket/run/experience: .*; give a store that"):
        ExperienceTable("s3://no-such-bucket/run")
