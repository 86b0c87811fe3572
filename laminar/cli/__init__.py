"""``laminar-flow``: the command line. One file a command; ``main`` is the console script."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from laminar.cli.app import run_app
    except KeyboardInterrupt:  # loading takes a second, in which a user may think better of it
        if "--json" in sys.argv:
            print('{"status": "stopped", "error": "ended by Ctrl-C", "run_id": null}')
        print("laminar-flow: ended by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    sys.exit(run_app(sys.argv[1:]))
