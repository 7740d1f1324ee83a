"""Command-line options that several commands share, and the `Spec` that they describe."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedexp.engine.select import ENGINES, check_engine_name
from fedexp.errors import UsageError, require
from fedexp.options import (
    build_task,
    parse_assignments,
    share_options,
    split_algorithm,
    split_task,
    split_task_options,
)
from fedexp.references import is_reference
from fedexp.runs.journal import CHECKPOINT_EVERY
from fedexp.runs.spec import Run, Spec, parse_privacy


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` for a mistake, which gets one line and exit status 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_run_options(parser: argparse.ArgumentParser, rounds: str = "the task's own") -> None:
    """Add the options that decide what a run computes."""
    parser.add_argument(
        "task",
        metavar="TASK",
        help="a task (`fedexp tasks` lists them), or your own: study.py:NAME",
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds ({rounds})")
    parser.add_argument(
        "--cohort",
        type=parse_cohort,
        metavar="K",
        help="clients per round: a number, a fraction (0.1), all, clients (3,7,9) or a function "
        "(study.py:choose); the task's own by default",
    )
    parser.add_argument(
        "--mode",
        default="paper",
        metavar="MODE",
        help="paper (default) for the values tuned for the task, authors-code for every deviation "
        "of the released code, or recommended for FedExP with a relative eps",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option, e.g. eps=0.01, local.lr=0.1, task.clients=20; in a comparison also "
        "fedexp:eps=0.01; may be repeated",
    )
    parser.add_argument(
        "--evaluate-every", type=positive, metavar="N", help="rounds between evaluations"
    )
    parser.add_argument(
        "--engine",
        default="auto",
        choices=ENGINES,
        metavar="NAME",
        help=f"{', '.join(ENGINES[1:])}; auto (default) takes the fastest that equals the loop",
    )
    parser.add_argument("--device", metavar="D", help="cpu (default) or cuda")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bf16"], help="arithmetic inside the model"
    )
    parser.add_argument(
        "--stop-at", type=float, metavar="ACC", help="end the run at this accuracy (or loss)"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits every time, on a GPU too"
    )
    parser.add_argument(
        "--start", metavar="RUN", help="begin with the weights of a run or a safetensors file"
    )
    parser.add_argument(
        "--privacy",
        metavar="KIND:...",
        help="simulate differential privacy, e.g. central:clip=1,delta=1e-5,epsilon=8",
    )
    parser.add_argument(
        "--by-client", action="store_true", help="evaluate every client; adds the worst decile"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def add_out(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add --out."""
    parser.add_argument("--out", type=Path, metavar="PATH", help=meaning)


def add_restart(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add --restart."""
    parser.add_argument("--restart", action="store_true", help=meaning)


def check_format(args: argparse.Namespace) -> None:
    """Refuse --json together with --format: one of them would be ignored."""
    both = args.json and args.format != "text"
    require(not both, f"--json and --format {args.format} exclude each other; leave one out")


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of checkpoints and progress; they do not affect results."""
    parser.add_argument(
        "--checkpoint-every",
        type=_seconds,
        default=CHECKPOINT_EVERY,
        metavar="SECONDS",
        help=f"time between checkpoints, 0 for one per round (default: {CHECKPOINT_EVERY:g})",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="plain lines for a log, no progress bar"
    )


def add_root_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of where runs are stored."""
    parser.add_argument(
        "--runs", type=Path, metavar="ROOT", help="folder of all runs ($FEDEXP_RUNS, or runs)"
    )
    parser.add_argument("--no-save", action="store_true", help="store nothing on the disk")


def root_of(args: argparse.Namespace) -> Path | None:
    """Return the folder of all runs; None where nothing is to be stored."""
    if args.no_save:
        require(args.runs is None, "--runs and --no-save exclude each other; choose one")
        return None
    return args.runs or Path(os.environ.get("FEDEXP_RUNS") or "runs")


def spec_of(args: argparse.Namespace, algorithm: str, seed: int) -> Spec:
    """Return the spec that the options of `add_run_options` describe.

    Task and algorithm are names, or references to the user's own (`study.py:task`).
    """
    task_name, task_source = split_task(args.task)
    name, source = split_algorithm(algorithm)
    return Spec(
        task=task_name,
        algorithm=name,
        seed=seed,
        rounds=args.rounds,
        cohort=args.cohort,
        mode=args.mode,
        evaluate_every=args.evaluate_every,
        engine=check_engine_name(args.engine),
        device=args.device,
        precision=args.precision,
        stop_at=args.stop_at,
        deterministic=args.deterministic,
        options=tuple(parse_assignments(args.set).items()),
        task_source=task_source,
        algorithm_source=source,
        privacy=None if args.privacy is None else parse_privacy(args.privacy),
        start=args.start,
        by_client=args.by_client,
    )


def runs_of(args: argparse.Namespace, names: Sequence[str], seed: int) -> list[Run]:
    """Return a run of each algorithm over one task; raise `UsageError` before data are read.

    `--set key=value` is for all algorithms that have the option, `--set name:key=value` for one.
    """
    of_task, others = split_task_options(parse_assignments(args.set))
    typed = tuple((f"task.{key}", value) for key, value in of_task.items())
    bare = {spec.algorithm: spec for spec in (spec_of(args, name, seed) for name in names)}
    require(len(bare) == len(names), "two algorithms have the same name; give one another")
    bare = {name: replace(spec, options=typed) for name, spec in bare.items()}
    for spec in bare.values():
        spec.check()
    first = next(iter(bare.values()))
    task = build_task(first.task, of_task, seed, first.mode, first.task_source)
    setups = {name: spec.prepare(task).setup for name, spec in bare.items()}
    shared = share_options(setups, others)
    specs = [replace(s, options=(*typed, *shared[name].items())) for name, s in bare.items()]
    return [spec.prepare(task) for spec in specs]


def listed(names: str) -> list[str]:
    """Return the names in a text such as `fedexp,fedavg`, each once."""
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _at_least(1, text)


def parse_cohort(text: str) -> int | float | tuple[int, ...] | str:
    """Parse a number, a fraction, a list of clients, `all`, or a reference to a function.

    >>> parse_cohort("10"), parse_cohort("0.1"), parse_cohort("3,7"), parse_cohort("all")
    (10, 0.1, (3, 7), 0)
    """
    if text == "all":
        return 0
    if is_reference(text):
        return text
    if "," in text:
        return tuple(_at_least(0, each.strip()) for each in text.split(",") if each.strip())
    if text.lstrip("-").isdecimal():
        return positive(text)
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(
            "must be a number, a fraction up to 1, all, clients such as 3,7, or a function such as "
            f"study.py:choose, not {text!r}"
        )
    return fraction


def seed(text: str) -> int:
    """Parse an integer of at least 0."""
    return _at_least(0, text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0, not {text!r}")
    return value


def _at_least(least: int, text: str) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, not {text!r}")
    return int(text)
