"""The trials and judged runs of the leaderboard: executed in this process, stored as CSV files.

A task has two files. `TASK-tuning.csv` has one line per trial: its row, its point and its score.
`TASK.csv` has one line per judged run: its row, seed and point, and the test accuracy of every
evaluation, which the page is computed from. Stored trials and runs are not executed again.
"""

from __future__ import annotations

import csv
import io
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from fedexp.engine import Record
from fedexp.experiment import simulate
from fedexp.engine.programs import SharedPrograms
from fedexp.engine.state import SimulationState
from fedexp.errors import DivergedError, NonFiniteUpdateWarning
from fedexp.options import Setup
from fedexp.precision import Precision
from fedexp.storage import write_bytes
from fedexp.tasks.task import Task
from fedexp.tuning.search import ROUNDS, window_of
from tools.leaderboard.protocol import ENTRIES, SEEDS, TASKS, TUNING_SEED, BoardTask, Entry, Point

TRIAL_HEADERS = ("row", "local_lr", "option", "value", "score", "machine")
RUN_HEADERS = (
    *("row", "seed", "local_lr", "option", "value", "machine", "seconds"),
    *("bytes_up", "bytes_down", "worst_decile", "test_accuracy"),
)
Log = Callable[[str], None]


class Trial(NamedTuple):
    """A point of a row's grid.

    Attributes:
        row: name of the row.
        point: its options.
        score: training accuracy, averaged over the last rounds; 0 if the trial diverged.
        machine: device, precision and version of torch.
    """

    row: str
    point: Point
    score: float
    machine: str


@dataclass(frozen=True)
class BoardRun:
    """A judged run.

    Attributes:
        row: name of the row.
        seed: its seed.
        point: its options.
        values: test accuracy at each evaluation; fewer than the task has if the run diverged.
        worst: accuracy of the worst decile of clients at the end; None if it diverged.
        bytes_up: bytes that all clients of a round send; None where they are not known.
        bytes_down: bytes that are sent to them.
        seconds: wall time with evaluations; None on a CPU.
        machine: device, precision and version of torch.
    """

    row: str
    seed: int
    point: Point
    values: tuple[float, ...]
    worst: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    seconds: float | None = None
    machine: str = ""


@dataclass
class Store:
    """The stored trials and judged runs of a task, in the order of the protocol."""

    task: str
    folder: Path
    trials: list[Trial]
    runs: list[BoardRun]

    @classmethod
    def load(cls, task: str, folder: Path) -> Store:
        """Return what is stored of a task; nothing if it has no files."""
        trials = [
            Trial(row["row"], _point(row), float(row["score"]), row["machine"])
            for row in _lines(folder / f"{task}-tuning.csv")
        ]
        return cls(task, folder, trials, [_run(row) for row in _lines(folder / f"{task}.csv")])

    def score(self, row: str, point: Point) -> float | None:
        """Return the score of a point; None if it is not stored."""
        found = (trial.score for trial in self.trials if (trial.row, trial.point) == (row, point))
        return next(found, None)

    def best(self, entry: Entry) -> Point | None:
        """Return the point of the judged runs: the highest score, of equal ones the first.

        None while trials are missing; on a task that is not tuned, the only point.
        """
        points = entry.points(self.task)
        if not TASKS[self.task].tuned:
            return points[0]
        scores = [self.score(entry.name, point) for point in points]
        known = [score for score in scores if score is not None]
        return None if len(known) < len(points) else points[known.index(max(known))]

    def judged(self, entry: Entry) -> list[BoardRun]:
        """Return the runs of a row with its best point, by seed."""
        best = self.best(entry)
        found = [run for run in self.runs if run.row == entry.name and run.point == best]
        return sorted(found, key=lambda run: run.seed)

    def discard(self, row: str) -> None:
        """Remove the trials and runs of a row."""
        self.trials = [trial for trial in self.trials if trial.row != row]
        self.runs = [run for run in self.runs if run.row != row]

    def write(self) -> None:
        """Write both files in the order of the protocol, whatever the order of execution."""
        rows = {name: k for k, name in enumerate(ENTRIES)}
        trials = sorted(self.trials, key=lambda t: (rows.get(t.row, len(rows)), *t.point.values()))
        runs = sorted(self.runs, key=lambda run: (rows.get(run.row, len(rows)), run.seed))
        if trials:
            lines = [(t.row, *_described(t.point), f"{t.score:.5f}", t.machine) for t in trials]
            _write(self.folder / f"{self.task}-tuning.csv", TRIAL_HEADERS, lines)
        if runs:
            _write(self.folder / f"{self.task}.csv", RUN_HEADERS, [_row(run) for run in runs])


@dataclass
class Runner:
    """Executes the rows of one task, which share the data on the device and CUDA graphs.

    Attributes:
        name: the task.
        folder: where the CSV files are.
        device: e.g. "cuda".
        precision: of the arithmetic inside the model.
        deadline: time of `time.monotonic` after which no trial or run is started.
        log: called with one line per trial and run.
    """

    name: str
    folder: Path
    device: str | None = None
    precision: Precision | None = None
    deadline: float = math.inf
    log: Log = print

    def __post_init__(self) -> None:
        self.board: BoardTask = TASKS[self.name]
        self.store = Store.load(self.name, self.folder)
        self._programs = SharedPrograms(most=self.board.engines)
        self._tasks: dict[int, Task] = {}

    def execute(self, entry: Entry) -> bool:
        """Tune a row and run its seeds, without what is stored; return whether it is complete."""
        for point in entry.points(self.name) if self.board.tuned else ():
            if self.store.score(entry.name, point) is not None:
                continue
            if self._is_late():
                return False
            began = time.monotonic()
            score = self._tune(entry, point)
            self.store.trials.append(Trial(entry.name, point, score, self._machine()))
            self.store.write()
            self._log(entry, f"{_shown(point)}: score {score:.4f}", began)
        best = self.store.best(entry)
        assert best is not None
        stored = {run.seed for run in self.store.judged(entry)}
        for seed in (seed for seed in SEEDS if seed not in stored):
            if self._is_late():
                return False
            began = time.monotonic()
            run = self._judge(entry, best, seed)
            old = [r for r in self.store.runs if (r.row, r.seed) != (entry.name, seed)]
            self.store.runs = [*old, run]
            self.store.write()
            last = f"{run.values[-1]:.4f}" if run.values else "nothing"
            self._log(entry, f"{_shown(best)} seed {seed}: ends at {last}", began)
        return True

    def _tune(self, entry: Entry, point: Point) -> float:
        """Return the score of a trial; every round of the window is evaluated, others are not."""
        first = window_of(ROUNDS)[0]
        task = self._task(TUNING_SEED)
        setup = entry.setup(task.local, self.name, point)
        try:
            start = None
            for record in self._records(task, setup, TUNING_SEED, ROUNDS, ROUNDS):
                start = record.state
                if record.round == first - 1:
                    break
            window = self._records(task, setup, TUNING_SEED, ROUNDS, 1, start)
            return float(f"{mean(record.train_accuracy or 0.0 for record in window):.5f}")
        except DivergedError:
            return 0.0

    def _judge(self, entry: Entry, point: Point, seed: int) -> BoardRun:
        """Train for all rounds, or until the run diverges."""
        board, task = self.board, self._task(seed)
        setup = entry.setup(task.local, self.name, point)
        values: list[float] = []
        last: Record | None = None
        began, ended = time.monotonic(), 0.0
        try:
            for record in self._records(task, setup, seed, board.rounds, board.evaluate_every):
                if record.test_accuracy is not None:
                    values.append(float(f"{record.test_accuracy:.4f}"))
                last, ended = record, time.monotonic()
        except DivergedError:
            pass  # `values` ends before the last evaluation
        run = BoardRun(entry.name, seed, point, tuple(values), machine=self._machine())
        if last is None:
            return run
        run = replace(run, bytes_up=last.bytes_up, bytes_down=last.bytes_down)
        if last.round == board.rounds:
            seconds = float(f"{ended - began:.1f}") if self._on_gpu else None
            run = replace(run, worst=_worst_decile(last, board.worst), seconds=seconds)
        return run

    def _records(
        self,
        task: Task,
        setup: Setup,
        seed: int,
        rounds: int,
        evaluate_every: int,
        start: SimulationState | None = None,
    ) -> Iterator[Record]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteUpdateWarning)
            yield from simulate(
                task,
                setup.algorithm,
                rounds,
                min(self.board.cohort, task.train.clients),
                seed,
                local=setup.local,
                weighting=setup.weighting,
                evaluate_every=evaluate_every,
                device=self.device,
                precision=self.precision,
                start=start,
                programs=self._programs,
            )

    def _task(self, seed: int) -> Task:
        key = seed if self.board.seeded else 0
        if key not in self._tasks:
            self._tasks[key] = self.board.build(key)
        return self._tasks[key]

    @property
    def _on_gpu(self) -> bool:
        return str(self.device).startswith("cuda")

    def _machine(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self._on_gpu else "CPU"
        parts = (name, self.precision or "", f"torch {torch.__version__.partition('+')[0]}")
        return ", ".join(part for part in parts if part)

    def _is_late(self) -> bool:
        if late := time.monotonic() > self.deadline:
            self.log(f"{self.name}: stopped by --seconds; the same command continues")
        return late

    def _log(self, entry: Entry, text: str, began: float) -> None:
        self.log(f"{self.name} {entry.name} {text} ({time.monotonic() - began:.1f} s)")


def _worst_decile(record: Record, split: str) -> float:
    assert record.task is not None
    task = replace(record.task, by_client=True, metrics={})
    values = task.evaluate(*record.state.output())
    return float(f"{values[f'{split}_accuracy_worst_decile']:.4f}")


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def _write(path: Path, headers: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.getvalue().encode())


def _described(point: Point) -> tuple[str, str, str]:
    """Return the client step size, and the option with its value, "" for none."""
    option, value = next(((n, v) for n, v in point.items() if n != "local.lr"), ("", ""))
    return f"{point['local.lr']:g}", option, f"{value:g}" if option else ""


def _point(row: Mapping[str, str]) -> Point:
    option = {row["option"]: float(row["value"])} if row["option"] else {}
    return {"local.lr": float(row["local_lr"]), **option}


def _row(run: BoardRun) -> tuple[object, ...]:
    about = (run.machine, run.seconds, run.bytes_up, run.bytes_down, run.worst)
    values = " ".join(f"{value:g}" for value in run.values)
    return (run.row, run.seed, *_described(run.point), *about, values)


def _run(row: Mapping[str, str]) -> BoardRun:
    return BoardRun(
        row["row"],
        int(row["seed"]),
        _point(row),
        tuple(map(float, row["test_accuracy"].split())),
        float(row["worst_decile"]) if row["worst_decile"] else None,
        int(row["bytes_up"]) if row["bytes_up"] else None,
        int(row["bytes_down"]) if row["bytes_down"] else None,
        float(row["seconds"]) if row["seconds"] else None,
        row["machine"],
    )


def _shown(point: Point) -> str:
    return " ".join(f"{name}={value:g}" for name, value in point.items())
