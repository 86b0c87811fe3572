"""``laminar-flow``: the command line. One file a command; ``main`` is the console script."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    from laminar.cli.app import run_app

    sys.exit(run_app(sys.argv[1:]))
