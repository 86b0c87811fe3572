"""``resume``: which runs go on, and what is said of those that do not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from laminar.errors import UserError
from laminar.flow import resume
from laminar.flow.load import load_flow
from laminar.flow.resume import prepare_resume
from laminar.flow.run import Prepared, prepare

FLOW = """
import laminar as lm

@lm.task
def five() -> int:
    return 5

@lm.flow
def demo(size: int = 3):
    return five()
"""
GONE = {"pid": 2**22 + 1}


@pytest.fixture
def run(tmp_path):
    """A run that was prepared, and whose process died before it could say more."""
    (tmp_path / "flow.py").write_text(FLOW)
    prepared = prepare(load_flow(str(tmp_path / "flow.py")), {"size": 4}, store=str(tmp_path / "runs"), run_id="r1")
    prepared.folder.update_json("run.json", GONE)
    return prepared.folder


def test_a_lost_run_goes_on_with_what_it_was_given(run):
    prepared = prepare_resume(run.url)
    assert isinstance(prepared, Prepared) and prepared.run_id == "r1"
    assert prepared.plan.parameters == {"size": 4}
    record = run.read_json("run.json")
    assert (record["status"], record["resumed"], record["pid"]) == ("running", 1, os.getpid())


def test_a_finished_run_has_nothing_to_do(run):
    run.update_json("run.json", {"status": "finished"})
    assert prepare_resume(run.url)["status"] == "finished"


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_that_goes_on_here_is_left_alone_whatever_the_user_says(run, lost):
    run.update_json("run.json", {"pid": os.getpid()})
    with pytest.raises(UserError, match=rf"r1 is still going on \(process {os.getpid()} on {socket.gethostname()}\)"):
        prepare_resume(run.url, lost=lost)


def test_a_run_of_another_machine_goes_on_only_on_the_users_word(run):
    run.update_json("run.json", {"host": "elsewhere"})
    with pytest.raises(UserError, match=r"on elsewhere\); stop it there or, if that machine is gone, .*--lost"):
        prepare_resume(run.url)
    assert isinstance(prepare_resume(run.url, lost=True), Prepared)


def test_of_two_that_resume_at_once_one_goes_on(run, monkeypatch):
    def slow(reference: str):
        monkeypatch.undo()
        assert isinstance(prepare_resume(run.url), Prepared)  # the other one is faster
        return load_flow(reference)

    monkeypatch.setattr(resume, "load_flow", slow)
    with pytest.raises(UserError, match="run r1 was resumed by somebody else just now"):
        prepare_resume(run.url)


def test_a_run_whose_flow_is_gone_or_has_changed_is_one_line(run):
    file = Path(run.read_json("run.json")["file"])
    file.write_text(FLOW.replace("size", "count"))
    with pytest.raises(UserError, match="flow `demo` has no parameter `size`"):
        prepare_resume(run.url)
    file.unlink()
    with pytest.raises(UserError, match=r"was started from .*flow.py, which is not there any more; .*put it back"):
        prepare_resume(run.url)
