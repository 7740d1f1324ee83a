"""The command `fedexp`. User errors print one line to stderr and exit with status 2.

Commands are in modules of this package, imported when they are called; `fedexp algorithms` and
`fedexp tasks`, which only print lists, are here. On many ranks (torchrun) only the first one
prints, and exactly one reports why the job failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from inspect import signature
from typing import Any

from fedexp import __version__
from fedexp.algorithms import ALGORITHMS
from fedexp.catalogue import TASKS, summary
from fedexp.distributed import AgentLostError, RankLostError, Ranks, current, leave, ranks
from fedexp.distributed.failure import REMEDY, failure_report, monitored
from fedexp.errors import (
    DataNote,
    EngineWarning,
    FedExPError,
    NonFiniteUpdateWarning,
    UsageError,
    remedies,
)
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.runs import RunWarning
from fedexp.runs.loggers import LoggerWarning
from fedexp_command.parsers import COMMANDS, Misuse, build_parser

REMEDIES = {
    "damaged": "fix it, or start over with --restart",
    "content": "--restart discards it and runs it again",
    "lock": "choose a folder on another disk, or --no-save",
    "deterministic": "leave --deterministic out, or train on the CPU",
    "worker": "try --jobs 1",
}
OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
SHOWN = (DataNote, NonFiniteUpdateWarning, EngineWarning, RunWarning, LoggerWarning)
MANY = ("run", "resume", "compare", "tune", "reproduce")  # commands that use all ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    On many ranks, those other than the first run only the commands that can use them.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            for kind in SHOWN:
                warnings.simplefilter("default", kind)
            try:
                with joined_ranks() as among, remedies(REMEDIES):
                    args = build_parser(__version__).parse_args(arguments)
                    if among is not None and not (among.is_first or args.command in MANY):
                        return OK
                    module, _, function = COMMANDS[args.command][1].partition(":")
                    command = vars(import_module(f"fedexp.cli.{module}"))[function]
                    status = int(command(args))
                    sys.stdout.flush()  # raises here, not at exit, for a full disk or closed pipe
                    if among is not None:
                        leave()
                    return status
            except RankLostError:
                return failure(None, FAILED)
            except AgentLostError as error:  # one line per machine: ranks cannot agree without it
                return failure(str(error), FAILED) if os.environ["LOCAL_RANK"] == "0" else FAILED
            except (UsageError, Misuse) as error:
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


@contextmanager
def joined_ranks() -> Iterator[Ranks | None]:
    """Join the ranks of this job, of which only the first prints; None for a single process."""
    among = ranks() if "WORLD_SIZE" in os.environ else None  # torchrun sets it
    if among is None:
        yield None
        return
    # torchrun terminates the ranks that a dead one has left; they still have a line to print
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with monitored(among), _silenced() if among.rank else nullcontext():
        yield among
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # finished: nothing is left to print


@contextmanager
def _silenced() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def unexpected(error: Exception) -> str | None:
    """Return an unexpected error in one line; None in a single process, where it is raised.

    torchrun's own report shows its traceback.
    """
    if current() is None:
        return None
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    what = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {what}; {REMEDY}"


def failure(message: str | None, status: int) -> int:
    """Print why the job has failed, once for all ranks, and end this one with the status.

    Args:
        message: what went wrong here; None where this rank was only interrupted.
        status: the exit status.
    """
    among = current()
    if among is None:
        print(f"fedexp: error: {message or 'interrupted'}", file=sys.stderr)
        return status
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # torchrun may terminate us before we have printed
    if (line := failure_report(among, message)) is not None:
        print(f"fedexp: error: {line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a group that has lost a rank cannot be closed properly


def list_algorithms(args: argparse.Namespace) -> int:
    """Print every algorithm with the options that --set can change."""
    for name, build in ALGORITHMS.items():
        options = Setup(build(), LocalTraining()).all_options().items()
        own = [f"{k.rpartition('.')[2]}={v}" for k, v in options if not k.startswith("local.")]
        _print_entry(name, summary(build), own)
    local = Setup(ALGORITHMS["fedavg"](), LocalTraining()).all_options().items()
    _print_entry("any", "Local training.", [f"{k}={v}" for k, v in local if k.startswith("local.")])
    return 0


def list_tasks(args: argparse.Namespace) -> int:
    """Print every task with the options that --set can change."""
    for name, build in TASKS.items():
        defaults = signature(build).parameters.values()
        _print_entry(name, summary(build), [f"task.{p.name}={p.default}" for p in defaults])
    return 0


def _print_entry(name: str, what: str, options: list[str]) -> None:
    print(f"{name:<16} {what}")
    print(f"{'':<16} --set {' '.join(options)}")


if __name__ == "__main__":
    sys.exit(main())
