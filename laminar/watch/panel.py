"""How a run looks in a terminal: the live panel, the plain lines of a log, the closing table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laminar.watch.view import RunView, one_line, shown, sparkline, whole

__all__ = ["evaluation_line", "live_panel", "step_line", "summary_table"]

_LABELS = {
    "status": "status",
    "seconds": "seconds",
    "steps": "steps",
    "trajectories": "trajectories trained on",
    "reward_first_quarter": "reward, first quarter",
    "reward_last_quarter": "reward, last quarter",
    "eval_before": "held-out reward before",
    "eval_after": "held-out reward after",
    "eval_greedy_before": "held-out greedy accuracy before",
    "eval_greedy_after": "held-out greedy accuracy after",
    "tokens_per_second": "tokens per second",
    "trainer_wait_fraction": "trainer waited (share of time)",
    "rollout_busy_fraction": "replicas generated (share of time)",
    "staleness_mean": "staleness, mean (versions)",
    "staleness_max": "staleness, highest (versions)",
    "versions_per_trajectory_max": "versions per trajectory, highest",
    "dropped": "trajectories dropped",
}


def live_panel(view: RunView, *, run_id: str, elapsed: float) -> Panel:
    """The panel shown while a run goes on. ``elapsed`` in seconds since the start."""
    parts: list[RenderableType] = [_bar(view, elapsed), _learning(view), _flow(view), _table(view)]
    if view.replicas:
        parts.append(_replicas(view))
    stages = "   ".join(f"{one_line(name)}: {one_line(state)}" for name, state in view.stages.items())
    return Panel(
        Group(*parts),
        title=Text(one_line(run_id)),
        title_align="left",
        subtitle=Text(stages) if stages else None,
        subtitle_align="left",
        box=box.ROUNDED,
    )


def step_line(view: RunView) -> str:
    """A step as one line of a log.

    Example
    -------
    >>> view = RunView()
    >>> _ = view.observe({"type": "step", "step": 5, "steps": 40, "reward_mean": 0.3, "staleness_mean": 1.25})
    >>> step_line(view)
    'step 5/40  reward 0.300  tokens/s -  staleness 1.25 (max -)  trainer waits -  ready -'
    """
    last = view.last
    return (
        f"step {view.step}/{view.steps or '?'}  reward {shown(last.get('reward_mean'))}"
        f"  tokens/s {whole(last.get('tokens_per_second'))}"
        f"  staleness {shown(last.get('staleness_mean'), 2)} (max {whole(last.get('staleness_max'))})"
        f"  trainer waits {_percent(last.get('trainer_wait_fraction'))}  ready {whole(_ready(view))}"
    )


def evaluation_line(event: Mapping[str, Any]) -> str:
    """A held-out evaluation as one line of a log.

    Example
    -------
    >>> evaluation_line({"step": 10, "version": 10, "reward_mean": 0.4, "prompts": 256})
    'held-out after step 10 (version 10): reward 0.400, greedy -, 256 prompts'
    """
    return (
        f"held-out after step {whole(event.get('step'))} (version {whole(event.get('version'))}):"
        f" reward {shown(event.get('reward_mean'))}, greedy {shown(event.get('greedy_accuracy'))},"
        f" {whole(event.get('prompts'))} prompts"
    )


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The closing table: known numbers first and by their names, other scalars as they are."""
    table = Table(show_header=False, box=box.SIMPLE)
    table.add_column()
    table.add_column(justify="right")
    for name in [*(n for n in _LABELS if n in summary), *(n for n in summary if n not in _LABELS)]:
        value = summary[name]
        if isinstance(value, (str, bool, int, float)) or value is None:
            table.add_row(Text(_LABELS.get(name, one_line(name))), Text(_cell(value)))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return shown(value, 1 if abs(value) >= 100 else 3)
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(value)
    return "-" if value is None else one_line(str(value))


def _bar(view: RunView, elapsed: float) -> Table:
    done = view.step - view.before
    left = elapsed / done * (view.steps - view.step) if done > 0 and view.steps else None
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(
        Text(f"step {view.step}/{view.steps or '?'}", style="bold"),
        ProgressBar(total=view.steps or 1, completed=view.step),
        Text(f"{_clock(elapsed)} gone, {_clock(left)} left"),
    )
    return row


def _learning(view: RunView) -> Text:
    held_out = view.evaluation
    text = Text.assemble("reward ", (shown(view.last.get("reward_mean")), "bold green"), "  ")
    text.append(sparkline(list(view.rewards.values())), style="green")
    if held_out:
        text.append(
            f"   held-out {shown(held_out.get('reward_mean'))}"
            f", greedy {shown(held_out.get('greedy_accuracy'))} after step {whole(held_out.get('step'))}"
        )
    return text


def _flow(view: RunView) -> Text:
    last = view.last
    return Text(
        f"tokens/s {whole(last.get('tokens_per_second'))}"
        f"   staleness {shown(last.get('staleness_mean'), 2)} mean, {whole(last.get('staleness_max'))} max"
        f"   trainer waits {_percent(last.get('trainer_wait_fraction'))}"
    )


def _table(view: RunView) -> Text:
    names = ("leased", "trained", "evicted", "dropped")
    rest = [f"{whole(view.table[name])} {name}" for name in names if name in view.table]
    return Text(", ".join([f"trajectories: {whole(_ready(view))} ready", *rest]))


def _replicas(view: RunView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("replica", "version", "state", "running", "waiting", "KV cache"):
        table.add_column(title, justify="left" if title in ("replica", "state") else "right")
    for name, replica in sorted(view.replicas.items()):
        used, total = replica.get("kv_used"), replica.get("kv_total")
        share = f" ({used / total:.0%})" if isinstance(used, int) and isinstance(total, int) and total else ""
        table.add_row(
            Text(one_line(name)),
            whole(replica.get("version")),
            Text(one_line(str(replica.get("state", "-")))),
            whole(replica.get("running")),
            whole(replica.get("waiting")),
            f"{whole(used)}{share}",
        )
    return table


def _ready(view: RunView) -> Any:
    return view.table.get("ready", view.last.get("ready"))


def _percent(value: Any) -> str:
    return shown(value * 100, 0, " %") if isinstance(value, (int, float)) else "-"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
