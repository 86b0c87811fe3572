"""What a person sees while a run goes on."""

from __future__ import annotations

import io
import os
import pty
import threading
from typing import TextIO

import pytest
from rich.console import Console

from laminar.watch.events import topic
from laminar.watch.panel import live_panel
from laminar.watch.progress import Progress
from laminar.watch.view import RunView, sparkline

STEP = {"type": "step", "steps": 40, "tokens_per_second": 2210.4, "staleness_mean": 1.25, "staleness_max": 3}
REPLICA = {"type": "replica", "name": "rollout-0", "state": "running", "running": 8, "waiting": 2}


def terminal() -> tuple[int, TextIO]:
    master, slave = pty.openpty()
    return master, os.fdopen(slave, "w", encoding="utf-8")


def drain(master: int) -> str:
    """What the terminal showed, up to the moment when its other side is closed."""
    shown = b""
    try:
        while data := os.read(master, 65536):
            shown += data
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(master)
    return shown.decode()


def test_run_id_and_dashboard_come_first() -> None:
    file = io.StringIO()
    progress = Progress(file=file)
    progress.start("quickstart-1", "http://127.0.0.1:8787/status", ["post_train"])
    assert file.getvalue() == "run quickstart-1   dashboard http://127.0.0.1:8787/status\n"


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    file = io.StringIO()
    with Progress(file=file) as progress:
        progress.start("r", None)
        for step in range(1, 41):
            progress.event({**STEP, "step": step, "reward_mean": step / 40})
            progress.event(REPLICA)
            progress.event({"type": "table", "ready": step})
        progress.event({"type": "evaluation", "step": 40, "version": 40, "reward_mean": 0.5, "prompts": 256})
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert len(lines) == 1 + 21 + 1
    assert lines[1].startswith("step 1/40  reward 0.025  tokens/s 2,210  staleness 1.25 (max 3)")
    assert lines[-2].startswith("step 40/40") and lines[-2].endswith("ready 39")
    assert lines[-1] == "held-out after step 40 (version 40): reward 0.500, greedy -, 256 prompts"


def test_every_sets_how_often_a_line_is_printed() -> None:
    file = io.StringIO()
    progress = Progress(file=file, every=10)
    for step in range(1, 41):
        progress.event({**STEP, "step": step})
    assert [line.split()[1] for line in file.getvalue().splitlines()] == [
        "1/40",
        "10/40",
        "20/40",
        "30/40",
        "40/40",
    ]


def test_a_pipe_gets_no_escape_codes_even_when_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    file = io.StringIO()
    with Progress(file=file) as progress:
        progress.start("r", None)
        progress.event({**STEP, "step": 1})
        progress.message("something", level="error")
        progress.stop({"status": "finished"})
    assert "\x1b" not in file.getvalue()


def test_unknown_events_and_missing_fields_are_no_trouble() -> None:
    file = io.StringIO()
    with Progress(file=file) as progress:
        for event in ({"type": "weather"}, {}, {"type": "step"}, {"type": "replica"}, {"type": "stage"}):
            progress.event(event)
        progress.event({"type": "step", "step": 1, "reward_mean": None, "tokens_per_second": float("nan")})
    assert "step 1/?  reward -  tokens/s -" in file.getvalue()


def test_text_of_others_is_shown_as_it_is_on_one_line_without_control_codes() -> None:
    file = io.StringIO()
    progress = Progress(file=file)
    progress.event({"type": "message", "level": "warning", "text": "[red]KeyError[/]: 'a'\n\x1b[2J" + "x" * 200})
    assert file.getvalue() == f"warning: [red]KeyError[/]: 'a' [2J{'x' * 200}\n"


def test_a_terminal_shows_the_panel_and_gets_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    master, file = terminal()
    with Progress(file=file) as progress:
        progress.start("quickstart-1", "http://127.0.0.1:8787/status", ["held_out", "post_train"])
        for step in range(1, 9):
            progress.event({**STEP, "step": step, "reward_mean": step / 8})
        progress.event({**REPLICA, "version": 7, "kv_used": 1024, "kv_total": 4096})
        progress.event({"type": "stage", "name": "held_out", "state": "kept"})
    file.close()
    shown = drain(master)
    for text in ("step 8/40", "▁▂▃▄▅▆▇█", "rollout-0", "1,024 (25%)", "held_out: kept", "post_train: to do"):
        assert text in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_the_terminal_comes_back_when_the_run_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, file = terminal()
    with pytest.raises(RuntimeError), Progress(file=file) as progress:
        progress.start("r", None)
        raise RuntimeError("the run failed")
    file.close()
    assert "\x1b[?25h" in drain(master)


def test_events_from_many_threads_never_block_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, file = terminal()
    shown: list[str] = []
    reader = threading.Thread(target=lambda: shown.append(drain(master)))
    reader.start()
    with Progress(file=file, refresh_per_second=500) as progress:
        progress.start("r", None)

        def feed(name: int) -> None:
            for step in range(10):
                progress.event({**STEP, "step": step})
                progress.event({"type": "replica", "name": f"rollout-{name}"})
                progress.message(f"line {name}-{step}.")

        threads = [threading.Thread(target=feed, args=(name,), daemon=True) for name in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
    file.close()
    reader.join(timeout=10)
    assert all(f"line {name}-{step}." in shown[0] for name in range(3) for step in range(10))


def test_the_closing_table_names_what_it_knows_and_keeps_what_it_does_not() -> None:
    file = io.StringIO()
    progress = Progress(file=file)
    progress.stop({"status": "finished", "eval_after": 0.51234, "seconds": 101.23, "shards": 2, "nested": {"a": 1}})
    rows = [line.split("  ") for line in file.getvalue().splitlines() if line.strip()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["status", "finished"],
        ["seconds", "101.2"],
        ["held-out reward after", "0.512"],
        ["shards", "2"],
    ]


def test_a_trainer_that_goes_back_takes_the_curve_back() -> None:
    view = RunView()
    for step in (1, 2, 3, 2):
        view.observe({"type": "step", "step": step, "reward_mean": step / 10})
    assert list(view.rewards) == [1, 2]


def test_a_long_curve_is_averaged_to_its_width() -> None:
    assert sparkline([float(n) for n in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


def test_the_topic_names_the_run() -> None:
    assert topic("r1") == "laminar-r1"


@pytest.mark.parametrize(("first", "left"), [(1, "0:30 left"), (21, "0:10 left")])
def test_the_time_left_is_that_of_the_steps_seen_also_after_a_resume(first: int, left: str) -> None:
    view = RunView()
    for step in range(first, first + 10):
        view.observe({**STEP, "step": step})
    console = Console(file=io.StringIO(), width=100)
    console.print(live_panel(view, run_id="r", elapsed=10.0))
    assert isinstance(console.file, io.StringIO) and left in console.file.getvalue()


def test_a_reader_that_goes_away_does_not_end_the_program() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as file:
        progress = Progress(file=file, every=1)
        progress.start("r", None)
        os.close(read)
        for step in range(1, 4):
            progress.event({**STEP, "step": step})
        progress.stop({"status": "finished"})


def test_a_terminal_that_hangs_up_does_not_end_the_program() -> None:
    master, file = terminal()
    with file:
        progress = Progress(file=file)
        progress.start("r", None)
        os.close(master)
        progress.event({**STEP, "step": 1})
        progress.message("a line")
        progress.stop()
