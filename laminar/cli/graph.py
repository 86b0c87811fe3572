"""``laminar-flow graph FILE``: a flow's nodes and what they depend on, as text or as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.cli.options import FLOW_COMMAND, chosen, given
from laminar.errors import UserError

__all__ = ["graph", "register"]

_ABOUT = "Show a flow's graph: its tasks and stages, each above what it depends on. Starts nothing."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("graph", help=_ABOUT, **FLOW_COMMAND)(graph)


def graph(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="FILE[:FLOW]")] = None,
    params: Annotated[Path | None, typer.Option("--params", metavar="FILE")] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE")] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> dict[str, Any]:
    """Show a flow's graph; its nodes."""
    flow = chosen("graph", _ABOUT, context, file)
    if flow is None:
        return {}
    drawn = flow.graph(**given(flow, "graph", context.args, params))
    if output is not None:
        _draw(drawn.svg(), output)
    if not json:
        print(drawn if output is None else f"wrote {output}")
    return {
        "status": "ok",
        "flow": flow.name,
        "nodes": [{"name": node.name, "kind": node.kind, "depends_on": list(node.depends_on)} for node in drawn.nodes],
    }


def _draw(svg: str, output: Path) -> None:
    if output.suffix.lower() != ".svg":
        raise UserError(f"--output {output}: expected a file that ends in .svg")
    try:
        output.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror or error}") from error
