"""What studies of many runs share: their execution in a folder of runs, and CSV files of results.

Runs are those of `fedexp`: an interrupted command continues where it stopped, and one that is over
is not run again. The CSV files in results/ are all that is archived of them.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.analysis.summary import Curve, rounds_to, smoothed
from fedexp.analysis.tables import csv_table
from fedexp.errors import NonFiniteUpdateWarning, unknown_name
from fedexp.experiment import Experiment, Row
from fedexp.runs import Outcome, RunInterrupted, run_all
from fedexp.runs.execute import stop_request
from fedexp.runs.folder import read_environment
from fedexp.storage import write_bytes

RESULTS = Path(__file__).parents[1] / "results"


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of `execute`."""
    name = module.removeprefix("tools.").replace("_", "-")
    parser = argparse.ArgumentParser(
        prog=module,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(began=time.monotonic())
    parser.add_argument("--device", help="e.g. cuda")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs", name), help="folder of all runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--out", type=Path, default=RESULTS / name, help="folder of the CSV files")
    return parser


def named(kind: str, text: str, names: Collection[str]) -> list[str]:
    """Return the names in a text with commas, once; raise `UsageError` for an unknown one."""
    for name in text.split(","):
        if name not in names:
            raise unknown_name(kind, name, names)
    return list(dict.fromkeys(text.split(",")))


def execute(
    grid: Sequence[Experiment], args: argparse.Namespace, restart: bool = False
) -> list[Outcome]:
    """Return the outcomes of all experiments; exit with status 0 where the time is over."""
    ends, number = args.began + args.seconds, count(1)

    def on_round(experiment: Experiment, row: Row) -> None:
        if row["round"] == experiment.rounds:
            task, _, algorithm, _ = experiment.names
            run = f"{task} {algorithm} seed {experiment.seed}"
            print(f"{run}: {next(number)} of {len(grid)}", flush=True)

    with stop_request() as request, warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteUpdateWarning)
        try:
            return run_all(
                grid,
                args.jobs,
                on_round,
                args.runs,
                stop=lambda: request() or time.monotonic() > ends,
                restart=restart,
            )
        except RunInterrupted:
            print(f"stopped; the same command {'starts over' if restart else 'continues'}")
            sys.exit(request.status if request() else 0)


def on_gpu(outcome: Outcome) -> bool:
    """Return whether a run was executed on a GPU."""
    return str(outcome.spec.get("device")).startswith("cuda")


def machine_of(outcome: Outcome) -> str:
    """Return device, precision and version of torch of a stored run."""
    assert outcome.folder is not None
    about = read_environment(outcome.folder)
    name = about["device"] if on_gpu(outcome) else "CPU"
    parts = (name, outcome.spec.get("precision"), f"torch {about['torch'].partition('+')[0]}")
    return ", ".join(part for part in parts if part)


def by_round(values: Sequence[float], every: int) -> Curve:
    """Return evaluations as a curve, which is NaN in the rounds between them.

    >>> by_round([0.5, 0.7], 2).tolist()
    [nan, 0.5, nan, 0.7]
    """
    curve = np.full(len(values) * every, np.nan)
    curve[every - 1 :: every] = values
    return curve


def crossings(curve: Curve, target: float, higher: bool = True) -> tuple[int | None, int | None]:
    """Return the rounds of the first and of the smoothed crossing; None if not reached."""
    first, smooth = (rounds_to(each, target, higher) for each in (curve, smoothed(curve)))
    return first, smooth


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the lines of a file; none if it does not exist."""
    if not path.is_file():
        return []
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def write_csv(path: Path, headers: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Write a file, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, f"{csv_table(headers, list(lines))}\n".encode())
