"""Entry point of the command `fedexp`, outside the package, whose import takes seconds (torch).

`--help` of every command is answered without that import. Ctrl-C during the import ends the command
as it does later, without a traceback.
"""

from __future__ import annotations

import sys
from contextlib import suppress

INTERRUPTED = 130


def main() -> int:
    """Import the command line and run it; return the exit status."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        from fedexp_command.parsers import Misuse, build_parser

        with suppress(Misuse):  # reported below
            build_parser().parse_args()  # prints the help and exits
    try:
        from fedexp.cli.main import main as run
    except KeyboardInterrupt:
        return INTERRUPTED
    return run()
