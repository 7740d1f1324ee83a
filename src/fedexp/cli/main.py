"""The command `fedexp`. Mistakes get one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from fedexp import __version__
from fedexp.cli import compare, data, listing, report, reproduce, resume, run, toy, tune
from fedexp.cli.options import Parser
from fedexp.errors import EngineWarning, FedExPError, NonFiniteUpdateWarning, UsageError
from fedexp.runs import RunWarning
from fedexp.runs.consumers import ConsumerWarning

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


def build_parser() -> Parser:
    parser = Parser(
        prog="fedexp",
        description="Federated optimisation that converges in half the rounds.",
    )
    parser.add_argument("--version", action="version", version=f"fedexp {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (run, resume, compare, tune, reproduce, report, toy, data):
        command.add_parser(subparsers)
    listing.add_parsers(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        for kind in (NonFiniteUpdateWarning, EngineWarning, RunWarning, ConsumerWarning):
            warnings.simplefilter("default", kind)
        try:
            args = build_parser().parse_args(arguments)
            status = int(args.run(args))
            sys.stdout.flush()  # a full disk or a closed pipe is told here, not at exit
            return status
        except UsageError as error:
            return _fail(str(error), MISUSED)
        except FedExPError as error:
            return _fail(str(error), FAILED)
        except BrokenPipeError:  # the reader has had enough, e.g. `| head`
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  so that exit does not flush again
            return OK
        except OSError as error:
            return _fail(f"{error.strerror or error}: {error.filename or 'output'}", MISUSED)
        except MemoryError:
            return _fail("out of memory; choose a smaller task, cohort or batch", MISUSED)
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)


def _fail(message: str, status: int) -> int:
    print(f"fedexp: error: {message}", file=sys.stderr)
    return status


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    print(f"fedexp: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
