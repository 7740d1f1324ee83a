"""The runs of the study: executed one after another in this process, stored as CSV files.

A file per task and variant has one line per run: its cell, seed and arm, the machine, the task's
metric at every evaluation (four digits, which the crossings are computed from) and the server step
size of the same rounds. Stored runs are not run again.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, repeat
from pathlib import Path

import numpy as np
import torch

from fedexp.algorithms import Algorithm
from fedexp.analysis.summary import Curve, rounds_to, smoothed
from fedexp.experiment import simulate
from fedexp.engine.programs import SharedPrograms
from fedexp.errors import DivergedError
from fedexp.precision import Precision
from fedexp.tasks.recipe import parse_goal
from fedexp.tasks.task import Task
from tools.eps_study.protocol import FEDEXP, TASKS, Arm, Cell, StudyTask

HEADERS = ("local_lr", "cohort", "seed", "arm", "eps", "machine", "values", "server_lr")


@dataclass(frozen=True)
class Key:
    """One run of the study."""

    cell: Cell
    seed: int
    arm: Arm


@dataclass(frozen=True)
class Curves:
    """What is stored of a run.

    Attributes:
        values: the task's metric at each evaluation until the run ended.
        server_lr: the server step size of these rounds.
        machine: device, precision and version of torch.
    """

    values: tuple[float, ...]
    server_lr: tuple[float, ...]
    machine: str

    def crossings(self, task: StudyTask) -> tuple[int | None, int | None]:
        """Return the rounds of the first and of the smoothed crossing; None if not reached."""
        curve = _by_round(self.values, task.evaluate_every)
        higher = parse_goal(task.metric).higher
        first, smooth = (rounds_to(each, task.target, higher) for each in (curve, smoothed(curve)))
        return first, smooth


Store = Mapping[Key, Curves]


def execute(
    name: str,
    constants: Sequence[float],
    folder: Path,
    *,
    variant: str = FEDEXP,
    device: str | None = None,
    precision: Precision | None = None,
    seconds: float = math.inf,
    log: Callable[[str], None] = print,
) -> None:
    """Execute the runs of a task that are not stored, seed by seed, cell by cell.

    Args:
        name: the task.
        constants: the relative eps to run.
        folder: where the CSV files are.
        variant: the extrapolating algorithm.
        device: e.g. "cuda".
        precision: of the arithmetic inside the model.
        seconds: no run is started after this time.
        log: called with one line per run.
    """
    study, store, start = TASKS[name], load(name, folder, variant), time.monotonic()
    programs = SharedPrograms(most=study.engines)
    for seed in study.seeds:
        task: Task | None = None
        for cell in study.cells:
            for arm in study.arms(cell, constants):
                key = Key(cell, seed, arm)
                if key in store:
                    continue
                if time.monotonic() - start > seconds:
                    log(f"{name}: stopped after {seconds:g} s; the same command continues")
                    return
                task = task or study.build(seed)
                began = time.monotonic()
                algorithm = arm.algorithm(variant)
                store[key] = _train(study, task, key, algorithm, device, precision, programs)
                _write(_path(name, folder, variant), study, store)
                first, smooth = store[key].crossings(study)
                log(
                    f"{variant} {name} lr {cell.local_lr:.3g} cohort {cell.cohort or 'all'} "
                    f"seed {seed} {arm}: {first}, {smooth} ({time.monotonic() - began:.1f} s)"
                )


def _train(
    study: StudyTask,
    task: Task,
    key: Key,
    algorithm: Algorithm,
    device: str | None,
    precision: Precision | None,
    programs: SharedPrograms,
) -> Curves:
    """Train until the smoothed crossing, the end of the budget or divergence."""
    values: list[float] = []
    steps: list[float] = []
    records = simulate(
        task,
        algorithm,
        study.budget,
        key.cell.cohort or "all",
        key.seed,
        local=replace(task.local, lr=key.cell.local_lr),
        evaluate_every=study.evaluate_every,
        device=device,
        precision=precision,
        programs=programs,
    )
    on_gpu = str(device).startswith("cuda")
    machine = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    parts = (machine, precision or "", f"torch {torch.__version__.partition('+')[0]}")
    found = Curves((), (), ", ".join(part for part in parts if part))
    try:
        for record in records:
            if (value := record.to_json().get(study.metric)) is None:
                continue
            values.append(float(f"{value:.4g}"))
            steps.append(float(f"{record.server_lr:.3g}"))
            found = replace(found, values=tuple(values), server_lr=tuple(steps))
            if found.crossings(study)[1] is not None:
                break
    except DivergedError:
        pass  # counts as not reached
    return found


def _by_round(values: Sequence[float], every: int) -> Curve:
    curve = np.full(len(values) * every, np.nan)
    curve[every - 1 :: every] = values
    return curve


def _path(name: str, folder: Path, variant: str) -> Path:
    """Return the file of a task, which of FedExP has the name of the task alone."""
    return folder / (f"{name}.csv" if variant == FEDEXP else f"{variant}-{name}.csv")


def load(name: str, folder: Path, variant: str = FEDEXP) -> dict[Key, Curves]:
    """Return the stored runs of a task; none if it has no file."""
    path = _path(name, folder, variant)
    if not path.is_file():
        return {}
    found: dict[Key, Curves] = {}
    for row in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
        cell = Cell(name, float(row["local_lr"]), int(row["cohort"]))
        arm = Arm(row["arm"], float(row["eps"]))  # type: ignore[arg-type]
        values, steps = (_numbers(row[n]) for n in ("values", "server_lr"))
        found[Key(cell, int(row["seed"]), arm)] = Curves(values, steps, row["machine"])
    return found


def _write(path: Path, study: StudyTask, store: Store) -> None:
    """Write the runs of a task in a fixed order: cells, seeds, arms by kind and eps."""
    cells = {cell: k for k, cell in enumerate(study.cells)}

    def place(key: Key) -> tuple[int, int, str, float]:
        return cells.get(key.cell, len(cells)), key.seed, key.arm.kind, key.arm.eps

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADERS)
    for key in sorted(store, key=place):
        run, cell = store[key], key.cell
        curves = (_text(run.values), _text(run.server_lr))
        about = (repr(cell.local_lr), cell.cohort, key.seed, key.arm.kind, repr(key.arm.eps))
        writer.writerow([*about, run.machine, *curves])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue(), encoding="utf-8")


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
