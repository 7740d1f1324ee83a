"""The command `fedexp`. Mistakes get one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedexp import __version__
from fedexp.cli import listing
from fedexp.cli.options import Parser
from fedexp.cli.process import failure, is_ranked, surprise, taking_part
from fedexp.distributed import RankLostError, leave
from fedexp.errors import EngineWarning, FedExPError, NonFiniteUpdateWarning, UsageError
from fedexp.runs import RunWarning
from fedexp.runs.loggers import ConsumerWarning

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
COMMANDS = ("run", "resume", "compare", "tune", "reproduce", "report", "archive", "toy", "data")


def build_parser(command: str | None = None) -> Parser:
    """The parser of one command, so that the others are not imported, or of all there are."""
    parser = Parser(
        prog="fedexp",
        description="Federated optimisation that converges in half the rounds.",
    )
    parser.add_argument("--version", action="version", version=f"fedexp {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module(f"fedexp.cli.{name}").add_parser(subparsers)
    listing.add_parsers(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        for kind in (NonFiniteUpdateWarning, EngineWarning, RunWarning, ConsumerWarning):
            warnings.simplefilter("default", kind)
        try:
            return _told(arguments)
        except KeyboardInterrupt:  # also while something else is told of
            return failure(None, INTERRUPTED)


def _told(arguments: Sequence[str] | None) -> int:
    """Run a command; tell in a line what went wrong."""
    try:
        return _run(arguments)
    except RankLostError:
        return failure(None, FAILED)
    except UsageError as error:
        return failure(str(error), MISUSED)
    except FedExPError as error:
        return failure(str(error), FAILED)
    except BrokenPipeError:  # the reader has had enough, e.g. `| head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  so that exit does not flush again
        return OK
    except OSError as error:
        return failure(f"{error.strerror or error}: {error.filename or 'output'}", MISUSED)
    except MemoryError:
        return failure("out of memory; choose a smaller task, cohort or batch", MISUSED)
    except Exception as error:
        if not is_ranked():
            raise
        return failure(surprise(error), FAILED)


def _run(arguments: Sequence[str] | None) -> int:
    """What the command says; on many ranks, those commands that can use them."""
    given = sys.argv[1:] if arguments is None else arguments
    with taking_part() as among:
        args = build_parser(given[0] if given else None).parse_args(given)
        if among is not None and not (among.is_first or getattr(args, "many", False)):
            return OK
        status = int(args.run(args))
        sys.stdout.flush()  # a full disk or a closed pipe is told here, not at exit
        leave()
        return status


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    print(f"fedexp: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
