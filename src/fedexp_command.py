"""Entry point of the command `fedexp`, outside the package, whose import takes seconds (torch).

`fedexp --help` is answered without that import. Ctrl-C during the import ends the command as it
does later, without a traceback.
"""

from __future__ import annotations

import argparse
import sys

INTERRUPTED = 130
DESCRIPTION = "Federated learning in fewer rounds: FedExP and its baselines."
COMMANDS = {
    "run": "train with one algorithm",
    "resume": "continue a run that was interrupted",
    "compare": "compare algorithms over seeds",
    "tune": "search for the best step sizes, or for eps",
    "reproduce": "reproduce the paper's tables and figures",
    "toy": "draw why extrapolation helps, in two dimensions",
    "report": "show runs as one HTML page that works offline",
    "archive": "store finished runs for good: a small CSV and TOML each",
    "data": "list, fetch, verify and show data sets",
    "algorithms": "list the algorithms and their options",
    "tasks": "list the tasks and their options",
}


def main() -> int:
    """Import the command line and run it; return the exit status."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        parser = argparse.ArgumentParser(prog="fedexp", description=DESCRIPTION)
        parser.add_argument(
            "--version", action="version", help="show program's version number and exit"
        )
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for name, what in COMMANDS.items():
            commands.add_parser(name, help=what)
        parser.print_help()
        return 0
    try:
        from fedexp.cli.main import main as run
    except KeyboardInterrupt:
        return INTERRUPTED
    return run()


if __name__ == "__main__":
    sys.exit(main())
