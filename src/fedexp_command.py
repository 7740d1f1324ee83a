"""Where the command `fedexp` begins: outside the package, whose import brings torch.

That takes seconds, in which Ctrl-C should end the command as it does later, without a traceback.
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
