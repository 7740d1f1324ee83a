"""The commands and their options, which need nothing but argparse.

A command is a list of options. `FLAGS` are those of `run`, `compare` and `tune` that are fields of
`fedexp.experiment.Experiment`, where None is the field's default.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

DESCRIPTION = "Federated learning in fewer rounds: FedExP and its baselines."
FORMATS = ("text", "markdown", "csv", "latex")
ENGINES = ("auto", "loop", "threads", "batched", "dense", "quadratic")
PRECISIONS = ("float32", "tf32", "bf16")
PARTITIONS = ("dirichlet", "dirichlet-unequal", "shards", "iid", "natural")
COMPARED = "fedexp,scaffold,fedadagrad,fedprox,fedavg"
CHECKPOINT_EVERY = 10.0  # seconds
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


positive, seed = partial(at_least, 1), partial(at_least, 0)


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


class Option(NamedTuple):
    """An argument of a command.

    Attributes:
        name: of the option, or of a positional argument.
        metavar: what stands for its value in the help; empty for the choices, or for none.
        help: what it does.
        settings: further arguments of `add_argument`.
    """

    name: str
    metavar: str
    help: str
    settings: dict[str, Any]


def option(
    name: str, metavar: str, help: str, type: Callable[[str], Any] = str, **more: Any
) -> Option:
    """Return an argument that takes a value."""
    return Option(name, metavar, help, {"type": type, **more})


def switch(name: str, help: str, default: bool | None = False) -> Option:
    """Return an option without a value."""
    return Option(name, "", help, {"action": "store_true", "default": default})


def repeated(name: str, metavar: str, help: str) -> Option:
    """Return an option that may be given several times."""
    return Option(name, metavar, f"{help}; may be repeated", {"action": "append", "default": []})


FLAGS = {
    "rounds": option("--rounds", "N", "rounds", positive),
    "cohort": option(
        "--cohort",
        "K",
        "clients per round: a number, a fraction (0.1), all, clients (3,7,9) or a function "
        "(study.py:choose)",
        cohort,
    ),
    "evaluate_every": option(
        "--evaluate-every",
        "N",
        "rounds between evaluations; 10,5 for every tenth and the last five",
        evaluations,
    ),
    "mode": option(
        "--mode",
        "MODE",
        "paper (default) for the values tuned for the task, authors-code for every deviation of "
        "the released code, or recommended for FedExP with a relative eps",
    ),
    "engine": option(
        "--engine",
        "NAME",
        f"{', '.join(ENGINES[1:])}; auto (default) takes the fastest that equals the loop",
        choices=ENGINES,
    ),
    "device": option("--device", "D", "cpu (default) or cuda"),
    "precision": option("--precision", "", "arithmetic inside the model", choices=PRECISIONS),
    "stop_at": option("--stop-at", "ACC", "end the run at this accuracy (or loss)", float),
    "deterministic": switch("--deterministic", "the same bits every time, on a GPU too", None),
    "by_client": switch("--by-client", "evaluate every client; adds the worst decile", None),
    "start": option("--start", "RUN", "begin with the weights of a run or a safetensors file"),
    "privacy": option(
        "--privacy",
        "KIND:...",
        "simulate differential privacy, e.g. central:clip=1,delta=1e-5,epsilon=8",
    ),
}
SET = repeated(
    "--set",
    "KEY=VALUE",
    "an option, e.g. eps=0.01, local.lr=0.1, task.clients=20; in a comparison also fedexp:eps=0.01",
)
JSON = switch("--json", "print one JSON object on stdout")
QUIET = switch("--quiet", "plain lines for a log, no progress bar")
SEED = option("--seed", "S", "default: 0", seed)
FORMAT = option("--format", "", "of the table (text)", choices=FORMATS, default="text")
SHARD = option(
    "--shard",
    "I/N",
    "only the I-th of N shares of the runs, for a job array; the last prints the table",
)
RUNS = option("runs", "RUNS", "run folders, or folders of them", Path, nargs="+")
EXPERIMENT = (
    option("task", "TASK", "a task (`fedexp tasks` lists them), or your own: study.py:NAME"),
    *FLAGS.values(),
    SET,
    JSON,
)
ROOT = (
    option("--runs", "ROOT", "folder of all runs ($FEDEXP_RUNS, or runs)", Path),
    switch("--no-save", "store nothing on the disk"),
)
WATCH = (
    option(
        "--checkpoint-every",
        "SECONDS",
        f"time between checkpoints, 0 for one per round (default: {CHECKPOINT_EVERY:g})",
        seconds,
        default=CHECKPOINT_EVERY,
    ),
    QUIET,
)
TRAINING = (
    *WATCH,
    switch("--restart", "discard what is stored of this run, and run it again"),
    option(
        "--client-states",
        "",
        "where client state (SCAFFOLD) is stored; by default in memory, if it fits",
        choices=["auto", "memory", "disk"],
        default="auto",
    ),
    repeated("--log", "WHERE", "log every round to tensorboard, wandb or mlflow"),
)
RESTART = switch("--restart", "discard what is stored of these runs, and run them again")


def out(meaning: str) -> Option:
    """Return --out."""
    return option("--out", "PATH", meaning, Path)


def jobs(what: str) -> Option:
    """Return --jobs."""
    text = f"{what} at a time (default: one per core; on a GPU one)"
    return option("--jobs", "N", text, positive)


# Of each command: its help, the module of `fedexp.cli` and the function that run it, its options.
COMMANDS: dict[str, tuple[str, str, tuple[Option, ...]]] = {
    "run": (
        "train with one algorithm",
        "run:train",
        (
            option("task", "TASK", f"{EXPERIMENT[0].help}; or the spec.toml of a run"),
            *EXPERIMENT[1:],
            option("--algorithm", "A", "default: fedexp; your own: study.py:NAME"),
            SEED,
            *ROOT,
            out("the run's own folder, instead of one in ROOT"),
            *TRAINING,
        ),
    ),
    "resume": (
        "continue a run that was interrupted",
        "run:train",
        (
            option("folder", "DIR", "the folder of the run", Path),
            *TRAINING,
            option(
                "--rounds",
                "N",
                "more rounds than the run has: it continues in a folder of its own",
                positive,
            ),
            switch(
                "--reopen",
                "continue a run that diverged from its last checkpoint (a run on Flower does so "
                "without it, when its app starts again)",
            ),
            JSON,
        ),
    ),
    "compare": (
        "compare algorithms over seeds",
        "compare:run",
        (
            *EXPERIMENT,
            option("--algorithms", "A,B,...", f"default: {COMPARED}", default=COMPARED),
            option("--seeds", "N", "seeds 0 to N-1", positive, default=1),
            option(
                "--target",
                "ACC,...",
                "accuracies (or losses) to reach; csv and json have the first one",
                targets,
                default=[],
            ),
            jobs("runs"),
            option(
                "--smooth",
                "W",
                "average final values and curves over W rounds (1; the paper's long runs: 20)",
                positive,
                default=1,
            ),
            FORMAT,
            SHARD,
            *ROOT,
            RESTART,
            *WATCH,
            out("the figure (compare-TASK.png)"),
        ),
    ),
    "tune": (
        "search for the best step sizes, or for eps",
        "tune:run",
        (
            *EXPERIMENT,
            option(
                "--algorithm",
                "A,B,...",
                "default: fedexp; your own: study.py:NAME",
                default="fedexp",
            ),
            option(
                "--protocol",
                "",
                "the paper's grids (default), or Optuna's TPE over ranges, with pruning",
                choices=["paper", "free"],
                default="paper",
            ),
            repeated("--grid", "KEY=V,V,...", "a grid of your own instead of the paper's"),
            switch("--epsilon", "the paper's rule of thumb: raise eps until the result drops"),
            option("--trials", "N", f"of a free search ({TRIALS})", positive),
            SEED,
            jobs("trials"),
            FORMAT,
            *ROOT,
            QUIET,
            out("the picture of two options (tune-TASK-ALGORITHM.png)"),
        ),
    ),
    "reproduce": (
        "reproduce the paper's tables and figures",
        "reproduce:run",
        (
            option("what", "WHAT", "a study; see --list", nargs="?"),
            switch("--list", "list the studies and their cost"),
            repeated("--task", "TASK", "a task of the study"),
            option("--rounds", "N", "rounds (the paper's number)", positive),
            option("--seeds", "N", "seeds (the paper's number)", positive),
            option(
                "--scale",
                "",
                "small: minutes on a CPU",
                choices=["full", "small"],
                default="full",
            ),
            option(
                "--mode", "", "default: paper", choices=["paper", "authors-code"], default="paper"
            ),
            option(
                "--from",
                "RUNS",
                "run nothing: use the runs in this folder or archive, and list missing ones",
                Path,
                dest="source",
            ),
            option(
                "--reuse",
                "RUNS",
                "take finished runs from this folder or archive, and execute the others only",
                Path,
            ),
            SHARD,
            *ROOT,
            RESTART,
            *WATCH,
            out("folder for the results (reproduce-WHAT)"),
            FORMAT,
            jobs("runs"),
            FLAGS["device"],
            FLAGS["precision"],
        ),
    ),
    "toy": (
        "draw why extrapolation helps, in two dimensions",
        "reproduce:draw_toy",
        (
            option("--rounds", "N", "default: 30", positive, default=30),
            option("--start", "W1,W2", "first model, e.g. --start=-1,2 (0,0)", default="0,0"),
            out("the figure (toy.png)"),
        ),
    ),
    "report": (
        "show runs as one HTML page that works offline",
        "report:report",
        (
            RUNS,
            option("-o/--out", "PATH", "the page (report.html)", Path, default=Path("report.html")),
            option("--figures", "DIR", "also draw PNG, SVG and PDF into this folder", Path),
            repeated(
                "--metric",
                "M",
                "draw this, e.g. test_accuracy or max:test_f1, instead of the defaults",
            ),
            repeated("--target", "[TASK=]X,...", "accuracies (or losses) to reach"),
            option("--algorithm", "A,B,...", "only runs of these algorithms", default=""),
            option("--task", "T,...", "only runs of these tasks", default=""),
            option(
                "--rounds", "N,M-K,...", "only runs of so many rounds, or in a range", default=""
            ),
            option(
                "--since",
                "WHEN",
                "only runs started in the last 2h or 3d, or since 2026-11-01 or another ISO time",
            ),
            repeated(
                "--exclude",
                "PATTERN",
                "leave out runs whose id or folder matches, e.g. '*-s3-*'",
            ),
        ),
    ),
    "archive": (
        "store finished runs for good: a small CSV and TOML each",
        "report:archive",
        (
            RUNS,
            option("--to", "DIR", "the archive (results)", Path, default=Path("results")),
            switch("--replace", "overwrite runs that are archived with other rounds"),
            option("--note", "TEXT", "remark on how they were run, e.g. on a shared GPU"),
        ),
    ),
    "data": ("list, fetch, verify and show data sets", "data:run", ()),
    "algorithms": ("list the algorithms and their options", "main:list_algorithms", ()),
    "tasks": ("list the tasks and their options", "main:list_tasks", ()),
}
FOLDER = option("--folder", "DIR", "data folder (default: FEDEXP_DATA)")
NAME = option("name", "NAME", "data set, e.g. cifar10")
DATA: dict[str, tuple[str, tuple[Option, ...]]] = {
    "list": ("list the data sets, and what the data folder has of them", (FOLDER,)),
    "fetch": (
        "download and unpack a data set",
        (FOLDER, NAME, option("--mirror", "URL", "URL of the folder to download from")),
    ),
    "verify": ("verify a data set's files", (FOLDER, NAME)),
    "show": (
        "show the number of examples per client and class, or clients and a sample of a text",
        (
            FOLDER,
            NAME,
            option(
                "--partition",
                "",
                "default: natural if the data set has clients, else dirichlet",
                choices=PARTITIONS,
            ),
            option("--clients", "N", "number of clients (default: 100)", int, default=100),
            option("--alpha", "A", "of dirichlet (default: 0.3)", float, default=0.3),
            option("--shards", "N", "shards per client (default: 2)", int, default=2),
            option("--seed", "S", "of the partition (default: 0)", seed, default=0),
            option("--out", "FILE", "figure to draw, e.g. clients.png", Path),
        ),
    ),
}


def build_parser(version: str = "") -> Parser:
    """Return the parser of all commands; `command` of its result is the name of one."""
    parser = Parser(prog="fedexp", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"fedexp {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, _, options) in COMMANDS.items():
        _add(commands.add_parser(name, help=summary), options)
    data = commands.choices["data"]
    data.description = (
        "List, fetch, verify and show data sets. They are stored in the folder that the "
        "environment variable FEDEXP_DATA names."
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="COMMAND")
    for name, (summary, options) in DATA.items():
        _add(actions.add_parser(name, help=summary, description=summary), options)
    return parser


def _add(parser: argparse.ArgumentParser, options: tuple[Option, ...]) -> None:
    for each in options:
        shown: dict[str, Any] = {"metavar": each.metavar} if each.metavar else {}
        parser.add_argument(*each.name.split("/"), help=each.help, **shown, **each.settings)
