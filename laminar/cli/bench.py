"""``laminar-flow bench NAME``: measurements of Laminar's parts on this machine."""

from __future__ import annotations

from inspect import signature
from typing import Annotated, Any

import typer

from laminar.bench import BENCHES
from laminar.cli.output import print_table, print_values
from laminar.errors import UserError
from laminar.flow.docstring import summary_of
from laminar.suggest import nearest

__all__ = ["bench", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", help="Measure a part of Laminar on this machine; without a name, list what there is.")(bench)


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The whole measurement, where there is more of it.")] = False,
    only: Annotated[str, typer.Option("--only", help="Some of its parts, as `a,b`, where there are several.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> dict[str, Any]:
    """Measure something; its numbers."""
    if name is None:
        if not json:
            print_table(["bench", "measures"], [(name, summary_of(BENCHES[name].__doc__)) for name in sorted(BENCHES)])
        return {"status": "ok", "benches": sorted(BENCHES)}
    if name not in BENCHES:
        close = nearest(name, BENCHES)
        hint = f"did you mean `{close}`? " if close else ""
        raise UserError(f"there is no bench `{name}`; {hint}there are: {', '.join(sorted(BENCHES))}")
    known = signature(BENCHES[name]).parameters
    if paper and "paper" not in known:
        raise UserError(f"bench `{name}` has no --paper: what it measures by default is all there is")
    if only and "only" not in known:
        raise UserError(f"bench `{name}` has no --only: it has no parts")
    options: dict[str, Any] = {"paper": True} if paper else {}
    if only:
        options["only"] = [part.strip() for part in only.split(",")]
    numbers = dict(BENCHES[name](**options))
    if not json:
        print_values(numbers, title=f"bench {name}")
    return {"status": "ok", "bench": name, **numbers}
