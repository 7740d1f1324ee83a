"""The commands and their options, which need nothing but argparse.

`FLAGS` are the options of `run`, `compare` and `tune` that are fields of
`fedexp.experiment.Experiment`; None is that field's default.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DESCRIPTION = "Federated learning in fewer rounds: FedExP and its baselines."
FORMATS = ("text", "markdown", "csv", "latex")
ENGINES = ("auto", "loop", "threads", "batched", "dense", "quadratic")
PRECISIONS = ("float32", "tf32", "bf16")
PARTITIONS = ("dirichlet", "dirichlet-unequal", "shards", "iid", "natural")
COMPARED = "fedexp,scaffold,fedadagrad,fedprox,fedavg"
CHECKPOINT_EVERY = 10.0  # seconds
TRIAL_ROUNDS = 50
TRIALS = 30  # of a free search


class Misuse(Exception):
    """A mistake in the options: one line."""


class Parser(argparse.ArgumentParser):
    """Raises `Misuse` for a mistake, which gets one line and exit status 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise Misuse(f"{message} (see {self.prog} --help)")


def at_least(least: int, text: str) -> int:
    """Parse a whole number from `least`."""
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, not {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return at_least(1, text)


def seed(text: str) -> int:
    """Parse an integer of at least 0."""
    return at_least(0, text)


def seconds(text: str) -> float:
    """Parse a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0, not {text!r}")
    return value


def targets(text: str) -> list[float]:
    """Parse a list of numbers, e.g. "0.92,0.94"."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write numbers, e.g. 0.92,0.94, not {text!r}") from None


def cohort(text: str) -> int | float | tuple[int, ...] | str:
    """Parse a number, a fraction, a list of clients, `all`, or a reference to a function.

    >>> cohort("10"), cohort("0.1"), cohort("3,7"), cohort("all")
    (10, 0.1, (3, 7), 'all')
    """
    if text == "all" or ":" in text:
        return text
    if "," in text:
        return tuple(at_least(0, client.strip()) for client in text.split(",") if client.strip())
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


def evaluations(text: str) -> int | tuple[int, ...]:
    """Parse a number of rounds, or two: every so many, and the last ones.

    >>> evaluations("5"), evaluations("10,5")
    (5, (10, 5))
    """
    numbers = tuple(positive(number.strip()) for number in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


FLAGS: Mapping[str, dict[str, Any]] = {
    "rounds": {"type": positive, "metavar": "N", "help": "rounds"},
    "cohort": {
        "type": cohort,
        "metavar": "K",
        "help": "clients per round: a number, a fraction (0.1), all, clients (3,7,9) or a function "
        "(study.py:choose)",
    },
    "mode": {
        "metavar": "MODE",
        "help": "paper (default) for the values tuned for the task, authors-code for every "
        "deviation of the released code, or recommended for FedExP with a relative eps",
    },
    "evaluate_every": {
        "type": evaluations,
        "metavar": "N",
        "help": "rounds between evaluations; 10,5 for every tenth and the last five",
    },
    "engine": {
        "choices": ENGINES,
        "metavar": "NAME",
        "help": f"{', '.join(ENGINES[1:])}; auto (default) takes the fastest that equals the loop",
    },
    "device": {"metavar": "D", "help": "cpu (default) or cuda"},
    "precision": {"choices": PRECISIONS, "help": "arithmetic inside the model"},
    "stop_at": {
        "type": float,
        "metavar": "ACC",
        "help": "end the run at this accuracy (or loss)",
    },
    "deterministic": {
        "action": "store_true",
        "default": None,
        "help": "the same bits every time, on a GPU too",
    },
    "start": {
        "metavar": "RUN",
        "help": "begin with the weights of a run or a safetensors file",
    },
    "privacy": {
        "metavar": "KIND:...",
        "help": "simulate differential privacy, e.g. central:clip=1,delta=1e-5,epsilon=8",
    },
    "by_client": {
        "action": "store_true",
        "default": None,
        "help": "evaluate every client; adds the worst decile",
    },
}


def build_parser(version: str = "") -> Parser:
    """Return the parser of all commands; `command` of its result is the name of one."""
    parser = Parser(prog="fedexp", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"fedexp {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, add_options) in COMMANDS.items():
        add_options(commands.add_parser(name, help=summary))
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    _experiment(parser, "; or the spec.toml of a run")
    parser.add_argument("--algorithm", metavar="A", help="default: fedexp; your own: study.py:NAME")
    parser.add_argument("--seed", type=seed, metavar="S", help="default: 0")
    _root(parser)
    _out(parser, "the run's own folder, instead of one in ROOT")
    _training(parser)


def _resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the run")
    _training(parser)
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="more rounds than the run has: it continues in a folder of its own",
    )
    parser.add_argument(
        "--reopen",
        action="store_true",
        help="continue a run that diverged from its last checkpoint (a run on Flower does so "
        "without it, when its app starts again)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _compare(parser: argparse.ArgumentParser) -> None:
    _experiment(parser)
    parser.add_argument(
        "--algorithms", default=COMPARED, metavar="A,B,...", help=f"default: {COMPARED}"
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument(
        "--target",
        type=targets,
        default=[],
        metavar="ACC,...",
        help="accuracies (or losses) to reach; csv and json have the first one",
    )
    _jobs(parser)
    parser.add_argument(
        "--smooth",
        type=positive,
        default=1,
        metavar="W",
        help="average final values and curves over W rounds (1; the paper's long runs: 20)",
    )
    _format(parser)
    _shard(parser)
    _root(parser)
    _restart(parser, "discard what is stored of these runs, and run them again")
    _watch(parser)
    _out(parser, "the figure (compare-TASK.png)")


def _tune(parser: argparse.ArgumentParser) -> None:
    _experiment(parser)
    parser.add_argument(
        "--algorithm",
        default="fedexp",
        metavar="A,B,...",
        help="default: fedexp; your own: study.py:NAME",
    )
    parser.add_argument(
        "--protocol",
        choices=["paper", "free"],
        default="paper",
        help="the paper's grids (default), or Optuna's TPE over ranges, with pruning",
    )
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=V,V,...",
        help="a grid of your own instead of the paper's; may be repeated",
    )
    parser.add_argument(
        "--epsilon",
        action="store_true",
        help="the paper's rule of thumb: raise eps until the result drops",
    )
    parser.add_argument("--trials", type=positive, metavar="N", help=f"of a free search ({TRIALS})")
    parser.add_argument("--seed", type=seed, default=0, metavar="S")
    _jobs(parser, "trials")
    _format(parser)
    _root(parser)
    parser.add_argument("--quiet", action="store_true", help="plain lines for a log, no bar")
    _out(parser, "the picture of two options (tune-TASK-ALGORITHM.png)")
    parser.set_defaults(rounds=TRIAL_ROUNDS)


def _reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", metavar="WHAT", help="a study; see --list")
    parser.add_argument("--list", action="store_true", help="list the studies and their cost")
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="TASK",
        help="a task of the study; may be repeated",
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="rounds (the paper's number)")
    parser.add_argument("--seeds", type=positive, metavar="N", help="seeds (the paper's number)")
    parser.add_argument(
        "--scale", choices=["full", "small"], default="full", help="small: minutes on a CPU"
    )
    parser.add_argument(
        "--mode", default="paper", choices=["paper", "authors-code"], help="default: paper"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUNS",
        help="run nothing: use the runs in this folder or archive, and list missing ones",
    )
    parser.add_argument(
        "--reuse",
        type=Path,
        metavar="RUNS",
        help="take finished runs from this folder or archive, and execute the others only",
    )
    _shard(parser)
    _root(parser)
    _restart(parser, "discard what is stored of these runs, and run them again")
    _watch(parser)
    _out(parser, "folder for the results (reproduce-WHAT)")
    _format(parser)
    _jobs(parser)
    for name in ("device", "precision"):
        parser.add_argument(f"--{name}", **FLAGS[name])


def _toy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="default: 30")
    parser.add_argument(
        "--start", default="0,0", metavar="W1,W2", help="first model, e.g. --start=-1,2 (0,0)"
    )
    _out(parser, "the figure (toy.png)")


def _report(parser: argparse.ArgumentParser) -> None:
    _runs(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="PATH",
        help="the page (report.html)",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="also draw PNG, SVG and PDF into this folder"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="M",
        help="draw this, e.g. test_accuracy or max:test_f1, instead of the defaults; "
        "may be repeated",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="[TASK=]X,...",
        help="accuracies (or losses) to reach; may be repeated",
    )
    group = parser.add_argument_group("filters", "only runs that all of them accept are shown")
    group.add_argument("--algorithm", default="", metavar="A,B,...", help="of these algorithms")
    group.add_argument("--task", default="", metavar="T,...", help="of these tasks")
    group.add_argument(
        "--rounds", default="", metavar="N,M-K,...", help="with this many rounds, or in a range"
    )
    group.add_argument(
        "--since",
        metavar="WHEN",
        help="started in the last 2h or 3d, or since 2026-11-01 or another ISO time",
    )
    group.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="without those whose id or folder matches, e.g. '*-s3-*'; may be repeated",
    )


def _archive(parser: argparse.ArgumentParser) -> None:
    _runs(parser)
    parser.add_argument(
        "--to", type=Path, default=Path("results"), metavar="DIR", help="the archive (results)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="overwrite runs that are archived with other rounds"
    )
    parser.add_argument(
        "--note", metavar="TEXT", help="remark on how they were run, e.g. on a shared GPU"
    )


def _data(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List, fetch, verify and show data sets. They are stored in the folder that the "
        "environment variable FEDEXP_DATA names."
    )
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    for name, what in {
        "list": "list the data sets, and what the data folder has of them",
        "fetch": "download and unpack a data set",
        "verify": "verify a data set's files",
        "show": "show the number of examples per client and class, or clients and a sample of a "
        "text",
    }.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--folder", metavar="DIR", help="data folder (default: FEDEXP_DATA)")
        if name != "list":
            command.add_argument("name", help="data set, e.g. cifar10")
        if name == "fetch":
            text = "URL of the folder to download from"
            command.add_argument("--mirror", metavar="URL", help=text)
        if name == "show":
            _partition(command)


def _partition(parser: argparse.ArgumentParser) -> None:
    text = "default: natural if the data set has clients, else dirichlet"
    parser.add_argument("--partition", choices=PARTITIONS, help=text)
    parser.add_argument("--clients", type=int, default=100, help="number of clients (default: 100)")
    parser.add_argument("--alpha", type=float, default=0.3, help="of dirichlet (default: 0.3)")
    parser.add_argument("--shards", type=int, default=2, help="shards per client (default: 2)")
    parser.add_argument("--seed", type=seed, default=0, help="of the partition (default: 0)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="figure to draw, e.g. clients.png")


COMMANDS = {
    "run": ("train with one algorithm", _run),
    "resume": ("continue a run that was interrupted", _resume),
    "compare": ("compare algorithms over seeds", _compare),
    "tune": ("search for the best step sizes, or for eps", _tune),
    "reproduce": ("reproduce the paper's tables and figures", _reproduce),
    "toy": ("draw why extrapolation helps, in two dimensions", _toy),
    "report": ("show runs as one HTML page that works offline", _report),
    "archive": ("store finished runs for good: a small CSV and TOML each", _archive),
    "data": ("list, fetch, verify and show data sets", _data),
    "algorithms": ("list the algorithms and their options", lambda parser: None),
    "tasks": ("list the tasks and their options", lambda parser: None),
}


def _experiment(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the options that decide what a run computes."""
    text = f"a task (`fedexp tasks` lists them), or your own: study.py:NAME{more}"
    parser.add_argument("task", metavar="TASK", help=text)
    for name, settings in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option, e.g. eps=0.01, local.lr=0.1, task.clients=20; in a comparison also "
        "fedexp:eps=0.01; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _training(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` and `resume` share."""
    _watch(parser)
    _restart(parser, "discard what is stored of this run, and run it again")
    parser.add_argument(
        "--client-states",
        choices=["auto", "memory", "disk"],
        default="auto",
        help="where client state (SCAFFOLD) is stored; by default in memory, if it fits",
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="WHERE",
        help="log every round to tensorboard, wandb or mlflow; may be repeated",
    )


def _watch(parser: argparse.ArgumentParser) -> None:
    """Add the options of checkpoints and progress; they do not affect results."""
    parser.add_argument(
        "--checkpoint-every",
        type=seconds,
        default=CHECKPOINT_EVERY,
        metavar="SECONDS",
        help=f"time between checkpoints, 0 for one per round (default: {CHECKPOINT_EVERY:g})",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="plain lines for a log, no progress bar"
    )


def _root(parser: argparse.ArgumentParser) -> None:
    """Add the options of where runs are stored."""
    parser.add_argument(
        "--runs", type=Path, metavar="ROOT", help="folder of all runs ($FEDEXP_RUNS, or runs)"
    )
    parser.add_argument("--no-save", action="store_true", help="store nothing on the disk")


def _runs(parser: argparse.ArgumentParser) -> None:
    text = "run folders, or folders of them"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help=text)


def _out(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--out", type=Path, metavar="PATH", help=meaning)


def _restart(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--restart", action="store_true", help=meaning)


def _format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the table (text)")


def _jobs(parser: argparse.ArgumentParser, what: str = "runs") -> None:
    text = f"{what} at a time (default: one per core; on a GPU one)"
    parser.add_argument("--jobs", type=positive, metavar="N", help=text)


def _shard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="only the I-th of N shares of the runs, for a job array; the last prints the table",
    )
