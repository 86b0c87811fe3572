"""``laminar-flow check FILE``: import, validate, print what would be run. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.cli.options import FLOW_COMMAND, chosen, given
from laminar.cli.output import print_values

__all__ = ["check", "register"]

_ABOUT = "Check a flow: resolved parameters, derived sizes and the processes it would start. Starts nothing."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check", help=_ABOUT, **FLOW_COMMAND)(check)


def check(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="FILE[:FLOW]")] = None,
    params: Annotated[Path | None, typer.Option("--params", metavar="FILE")] = None,
    store: Annotated[str, typer.Option("--store", metavar="URL")] = "runs",
    json: Annotated[bool, typer.Option("--json")] = False,
) -> dict[str, Any]:
    """Check a flow; what was found."""
    flow = chosen("check", _ABOUT, context, file)
    if flow is None:
        return {}
    plan = flow.check(store=store, **given(flow, "check", context.args, params))
    roles = _roles(plan.needs())
    weights = _transport()
    if not json:
        print_values(plan.parameters, title=f"flow {flow.name}")
        for stage, sizes in plan.derived().items():
            print_values(sizes, title=f"\n{stage}")
        print_values(roles, title="\nprocesses")
        print_values(weights, title="\nweights between hosts")
    return {
        "status": "ok",
        "flow": flow.name,
        "parameters": plan.parameters,
        "derived": plan.derived(),
        "roles": roles,
        "weights": weights,
        "store": plan.context.store,
    }


def _roles(needs: dict[str, Any]) -> dict[str, str]:
    """The workers that would be started, and how many threads each would have."""
    from laminar.cluster import Needs, worker_spec

    spec = worker_spec(Needs(**needs))
    return {"scheduler": ""} | {name: f"{one['options']['nthreads']} threads" for name, one in spec.items()}


def _transport() -> dict[str, str]:
    """How weights would travel between hosts, and why so."""
    from laminar.weights.transport import choose

    choice = choose()
    return {"transport": choice.name, "because": choice.why}
