"""A flow's parameters as command-line options, made from its signature.

Typer takes the command's own options; what it does not know comes here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from laminar.errors import UserError
from laminar.flow.flow import Flow
from laminar.flow.parameters import Parameter
from laminar.flow.params_file import read_params
from laminar.suggest import nearest

__all__ = ["FLOW_COMMAND", "chosen", "given", "parse"]

FLOW_COMMAND: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
"""How a command that takes a flow's options is registered."""

OWN_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "run": {
        "--store URL": "Run store: a path or any fsspec URL. [default: runs]",
        "--run-id ID": "Name of the run. [default: a new one]",
        "--scheduler ADDRESS": "Run on the cluster of this Dask scheduler. [default: processes of its own]",
    },
    "check": {"--store URL": "Run store: a path or any fsspec URL. [default: runs]"},
    "graph": {"--output FILE": "Draw it into FILE (.svg) instead of printing it."},
}

_HELP = ("--help", "-h")

_COMMON = {
    "--params FILE": "Parameters from a JSON, TOML or YAML file; options given here win.",
    "--json": "Print one JSON object and nothing else.",
    "--help": "Show this and exit.",
}


def given(flow: Flow, command: str, arguments: Sequence[str], params: Path | None) -> dict[str, Any]:
    """The flow's parameters that the user gave, by option or file; the option wins.

    Raises
    ------
    UserError
        An option that does not exist, or a file that cannot be read.
    """
    from_file = read_params(params) if params is not None else {}
    own = [name.partition(" ")[0] for name in {**OWN_OPTIONS[command], **_COMMON}]
    return {**from_file, **parse(flow.parameters, arguments, own=own, flow=flow.name)}


def parse(
    parameters: Sequence[Parameter], arguments: Sequence[str], *, own: Sequence[str] = (), flow: str = ""
) -> dict[str, Any]:
    """Values out of ``--name value``, ``--name=value``, ``--flag`` and ``--no-flag``; the last one counts.

    Parameters
    ----------
    own
        The command's own options: named when one of them is mistyped.

    Raises
    ------
    UserError
        An option that does not exist, one without its value, or a stray argument.

    Example
    -------
    >>> options = [Parameter("steps", int), Parameter("fast", bool), Parameter("lr", float)]
    >>> parse(options, ["--steps", "10", "--no-fast", "--lr=-1e-4"])
    {'steps': 10, 'fast': False, 'lr': -0.0001}
    >>> parse(options, ["--step", "10"], own=["--store"], flow="demo")
    Traceback (most recent call last):
    laminar.errors.UserError: there is no option --step; did you mean --steps? Flow `demo` has: --steps, --fast, --lr
    """
    values: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.partition("=")
        parameter, negated = _find(name, parameters)
        if parameter is None:
            raise UserError(_unknown(word, name, parameters, own, flow))
        if parameter.is_flag and not equals:
            values[parameter.name] = not negated
            continue
        if negated:
            raise UserError(f"option {name} takes no value; give {name} or {parameter.option}")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise UserError(f"option {name} needs a value: {parameter.type_name}")
            text = waiting.pop(0)
        values[parameter.name] = parameter.from_text(text)
    return values


def _find(name: str, parameters: Sequence[Parameter]) -> tuple[Parameter | None, bool]:
    """The parameter that an option is of, and whether it is its ``--no-`` form."""
    for parameter in parameters:
        if name in (parameter.option, f"--{parameter.name}"):
            return parameter, False
        if parameter.is_flag and name == f"--no-{parameter.option[2:]}":
            return parameter, True
    return None, False


def _unknown(word: str, name: str, parameters: Sequence[Parameter], own: Sequence[str], flow: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; options are given as --name value"
    options = [parameter.option for parameter in parameters]
    close = nearest(name, [*options, *own])
    has = f"Flow `{flow}` has: {', '.join(options)}" if options else f"Flow `{flow}` has no parameters"
    return f"there is no option {name}; {f'did you mean {close}? ' if close else ''}{has}"


def chosen(command: str, about: str, context: typer.Context, file: str | None) -> Flow | None:
    """The flow that FILE names; None where help was asked for, which is printed then, with the flow's parameters.

    Raises
    ------
    UserError
        No FILE, or none with such a flow.
    """
    from laminar.flow.load import load_flow

    flow = None if file is None or file in _HELP else load_flow(file)
    if any(word in _HELP for word in (file, *context.args)):
        _print_help(command, about, flow)
        return None
    if flow is None:
        raise UserError(f"which flow? Give a FILE, as laminar-flow {command} flows/quickstart.py")
    return flow


def _print_help(command: str, about: str, flow: Flow | None) -> None:
    """The help of a command, with the options of a flow where one is named."""
    from rich.console import Console

    from laminar.cli.output import print_table

    name = "FILE[:FLOW]" if flow is None else Path(flow.function.__code__.co_filename).name
    console = Console(highlight=False, markup=False)
    console.print(f"Usage: laminar-flow {command} {name} [--parameter VALUE ...] [OPTIONS]\n\n{about}\n")
    if flow is not None:
        console.print(f"{flow.name}: {flow.summary}" if flow.summary else flow.name)
        rows = [_help_row(parameter) for parameter in flow.parameters]
        print_table(["parameter", "type", "default", ""], rows)
        console.print()
    else:
        console.print("With a FILE, --help shows its flow's parameters.\n")
    print_table(["option", ""], list({**OWN_OPTIONS[command], **_COMMON}.items()))
    sys.stdout.flush()


def _help_row(parameter: Parameter) -> tuple[str, str, str, str]:
    option = parameter.option
    if parameter.is_flag:
        option = f"{option} / --no-{option[2:]}"
    default = "required" if parameter.required else "none" if parameter.default is None else str(parameter.default)
    return option, parameter.type_name, default, parameter.help
