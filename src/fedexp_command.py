"""Entry point of the command `fedexp`, outside the package, whose import takes seconds (torch).

Ctrl-C during the import ends the command as it does later, without a traceback.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> int:
    """Import the command line and run it; return the exit status."""
    try:
        from fedexp.cli.main import main as run
    except KeyboardInterrupt:
        return INTERRUPTED
    return run()


if __name__ == "__main__":
    sys.exit(main())
