"""The curves of the study, as lines of CSV files.

A file per task and variant has one line per run: its cell, seed and arm, the machine, the task's
metric at every evaluation (four digits, which the crossings are computed from) and the server step
size of the same rounds, up to the smoothed crossing. Stored runs are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import NamedTuple

from fedexp.experiment import Experiment
from fedexp.runs import Outcome
from fedexp.tasks.recipe import parse_goal
from tools.eps_study.protocol import FEDEXP, TASKS, Arm, Cell, StudyTask
from tools.grid import by_round, crossings, execute, machine_of, read_csv, write_csv

HEADERS = ("local_lr", "cohort", "seed", "arm", "eps", "machine", "values", "server_lr")


@dataclass(frozen=True)
class Key:
    """One run of the study."""

    cell: Cell
    seed: int
    arm: Arm

    def experiment(self, variant: str, args: argparse.Namespace) -> Experiment:
        """Return the run, over all rounds of the budget."""
        study = TASKS[self.cell.task]
        return Experiment(
            study.task,
            self.arm.algorithm(variant),
            self.seed,
            study.budget,
            self.cell.cohort or "all",
            options={"local.lr": self.cell.local_lr},
            evaluate_every=study.evaluate_every,
            device=args.device,
            precision=args.precision,
        )


class Curves(NamedTuple):
    """What is stored of a run.

    Attributes:
        values: the task's metric at each evaluation until the smoothed crossing, or the end.
        server_lr: the server step size of these rounds.
        machine: device, precision and version of torch.
    """

    values: tuple[float, ...]
    server_lr: tuple[float, ...]
    machine: str

    @classmethod
    def of(cls, study: StudyTask, outcome: Outcome) -> Curves:
        """Return what is stored of a run; one that diverged counts as not reached."""
        rows = [row for row in outcome.rows if row.get(study.metric) is not None]
        values = tuple(float(f"{row[study.metric]:.4g}") for row in rows)
        steps = tuple(float(f"{row['server_lr']:.3g}") for row in rows)
        whole = cls(values, steps, machine_of(outcome))
        _, smooth = whole.crossings(study)
        end = len(values) if smooth is None else smooth // study.evaluate_every
        return cls(values[:end], steps[:end], whole.machine)

    def crossings(self, study: StudyTask) -> tuple[int | None, int | None]:
        """Return the rounds of the first and of the smoothed crossing; None if not reached."""
        curve = by_round(self.values, study.evaluate_every)
        return crossings(curve, study.target, parse_goal(study.metric).higher)


Store = Mapping[Key, Curves]


def complete(name: str, constants: Sequence[float], variant: str, args: argparse.Namespace) -> None:
    """Execute the runs of a task that are not stored, and write its file.

    Args:
        name: the task.
        constants: the relative eps to run.
        variant: the extrapolating algorithm.
        args: options of `tools.grid.execute`.
    """
    study, store = TASKS[name], load(name, args.out, variant)
    keys = [
        key
        for seed in study.seeds
        for cell in study.cells
        for arm in study.arms(cell, constants)
        if (key := Key(cell, seed, arm)) not in store
    ]
    outcomes = execute([key.experiment(variant, args) for key in keys], args)
    for key, outcome in zip(keys, outcomes, strict=True):
        store[key] = Curves.of(study, outcome)
    _write(_path(name, args.out, variant), study, store)


def _path(name: str, folder: Path, variant: str) -> Path:
    """Return the file of a task, which of FedExP has the name of the task alone."""
    return folder / (f"{name}.csv" if variant == FEDEXP else f"{variant}-{name}.csv")


def load(name: str, folder: Path, variant: str = FEDEXP) -> dict[Key, Curves]:
    """Return the stored runs of a task; none if it has no file."""
    store = {}
    for row in read_csv(_path(name, folder, variant)):
        cell = Cell(name, float(row["local_lr"]), int(row["cohort"]))
        arm = Arm(row["arm"], float(row["eps"]))  # type: ignore[arg-type]
        values, steps = (_numbers(row[n]) for n in ("values", "server_lr"))
        store[Key(cell, int(row["seed"]), arm)] = Curves(values, steps, row["machine"])
    return store


def _write(path: Path, study: StudyTask, store: Store) -> None:
    """Write the runs of a task in a fixed order: cells, seeds, arms by kind and eps."""
    cells = {cell: k for k, cell in enumerate(study.cells)}

    def place(key: Key) -> tuple[int, int, str, float]:
        return cells.get(key.cell, len(cells)), key.seed, key.arm.kind, key.arm.eps

    lines = []
    for key in sorted(store, key=place):
        cell, arm = key.cell, key.arm
        about = (repr(cell.local_lr), cell.cohort, key.seed, arm.kind, repr(arm.eps))
        values, steps, machine = store[key]
        lines.append([*about, machine, _text(values), _text(steps)])
    write_csv(path, HEADERS, lines)


def _text(values: Sequence[float]) -> str:
    """Return numbers with six digits, those that repeat as `1*100`.

    >>> _text([1.0, 1.0, 1.0, 2.5])
    '1*3 2.5'
    """
    runs = ((f"{value:g}", len(list(same))) for value, same in groupby(values))
    return " ".join(text if count == 1 else f"{text}*{count}" for text, count in runs)


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of `_text`."""
    parts = (part.partition("*") for part in text.split())
    return tuple(chain.from_iterable(repeat(float(value), int(n or 1)) for value, _, n in parts))
