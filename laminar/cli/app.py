"""The command line as a whole: which commands there are, and how each of them ends.

A command prints for people and returns what ``--json`` prints. Errors are one line on stderr; with ``--json``
stdout is one JSON object, whatever happens.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.cli import bench, check, drain, graph, ls, query, repack, resume, run, tail
from laminar.cli.output import Failure, only_json, print_error, print_json
from laminar.errors import LaminarError

__all__ = ["app", "run_app"]

_CTRL_C = 130
"""What typer makes of a KeyboardInterrupt, as shells do."""

app = typer.Typer(
    name="laminar-flow",
    help="Asynchronous RL post-training of language models as a dataflow on Dask.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (run, resume, repack, drain, check, graph, query, tail, ls, bench):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"laminar-flow {version('laminar-flow')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Asynchronous RL post-training of language models as a dataflow on Dask."""


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line.

    Returns
    -------
    int
        0, or 2 where the user's input was wrong, 130 where it was ended at once by Ctrl-C, 1 otherwise.
    """
    if "--json" not in arguments:
        return _run(arguments)[0]
    with only_json() as stdout:
        code, answer = _run(arguments)
        print_json(answer, stdout)
    return code


def _run(arguments: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """The exit code, and what ``--json`` says."""
    try:
        answer = app(list(arguments) or ["--help"], prog_name="laminar-flow", standalone_mode=False)
    except Failure as failure:
        return _failed(failure.text, failure.exit_code, failure.answer)
    except LaminarError as error:
        return _failed(str(error), error.exit_code, {})
    except typer.TyperException as error:
        return _failed(error.format_message(), error.exit_code, {})
    except SystemExit as error:  # how rich and typer end where nobody reads our output any more
        return 1, {"status": "failed", "error": f"ended with {error.code}", "run_id": None}
    except Exception as error:  # noqa: BLE001 - the process's boundary: logged, and told in one line
        return _failed(f"{type(error).__name__}: {error}; {_log(error)}", 1, {})
    if answer == _CTRL_C:
        return _failed("ended by Ctrl-C", _CTRL_C, {"status": "stopped"})
    if isinstance(answer, int):  # typer's way to give an exit code
        return answer, {}
    return 0, dict(answer) if isinstance(answer, Mapping) else {}


def _failed(text: str, code: int, answer: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    text = " ".join(text.split())
    print_error(text)
    return code, {"status": "failed", "error": text, "run_id": None, **answer}


def _log(error: BaseException) -> str:
    try:
        path = Path(tempfile.gettempdir()) / f"laminar-flow-{os.getpid()}.log"
        path.write_text("".join(traceback.format_exception(error)))
    except OSError as full:
        return f"its traceback could not be kept ({full})"
    return f"its traceback is in {path}"


if __name__ == "__main__":
    sys.exit(run_app(sys.argv[1:]))
