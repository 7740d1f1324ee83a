"""The command `fedexp`. Mistakes get one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedexp import __version__
from fedexp.cli.options import Parser
from fedexp.cli.process import failure, joined_ranks, unexpected
from fedexp.distributed import RankLostError, leave
from fedexp.errors import EngineWarning, FedExPError, NonFiniteUpdateWarning, UsageError
from fedexp.runs import RunWarning
from fedexp.runs.loggers import LoggerWarning

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
SHOWN = (NonFiniteUpdateWarning, EngineWarning, RunWarning, LoggerWarning)
COMMANDS = {  # and their modules in this package
    "run": "run",
    "resume": "resume",
    "compare": "compare",
    "tune": "tune",
    "reproduce": "reproduce",
    "report": "report",
    "archive": "archive",
    "toy": "toy",
    "data": "data",
    "algorithms": "listing",
    "tasks": "listing",
}


def build_parser(command: str | None = None) -> Parser:
    """Return the parser of one command, so that the others are not imported, or of all."""
    parser = Parser(
        prog="fedexp",
        description="Federated optimisation that converges in half the rounds.",
    )
    parser.add_argument("--version", action="version", version=f"fedexp {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for name in modules:
        import_module(f"fedexp.cli.{name}").add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    On many ranks, those other than the first run only the commands that can use them.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            for kind in SHOWN:
                warnings.simplefilter("default", kind)
            try:
                with joined_ranks() as ranks:
                    args = build_parser(given[0] if given else None).parse_args(given)
                    args.ranks = ranks
                    if ranks is not None and not (ranks.is_first or getattr(args, "many", False)):
                        return OK
                    status = int(args.run(args))
                    sys.stdout.flush()  # raises here, not at exit, for a full disk or closed pipe
                    leave()
                    return status
            except RankLostError:
                return failure(None, FAILED)
            except UsageError as error:
                return failure(str(error), MISUSED)
            except FedExPError as error:
                return failure(str(error), FAILED)
            except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head`
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115  so that exit does not flush again
                return OK
            except OSError as error:
                return failure(f"{error.strerror or error}: {error.filename or 'output'}", MISUSED)
            except MemoryError:
                return failure("out of memory; choose a smaller task, cohort or batch", MISUSED)
            except Exception as error:
                if (line := unexpected(error)) is None:
                    raise
                return failure(line, FAILED)
    except KeyboardInterrupt:  # also while another error is reported
        return failure(None, INTERRUPTED)


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    print(f"fedexp: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
