"""The trials and judged runs of the leaderboard, as lines of CSV files.

A task has two files. `TASK-tuning.csv` has one line per trial: its row, its point and its score.
`TASK.csv` has one line per judged run: its row, seed and point, and the test accuracy of every
evaluation, which the page is computed from. Stored trials and runs are not executed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from fedexp.runs import Outcome
from fedexp.tuning.search import ROUNDS, window_of
from tools.grid import execute, machine_of, on_gpu, read_csv, write_csv
from tools.leaderboard.protocol import ENTRIES, SEEDS, TASKS, TUNING_SEED, Entry, Point

Wanted = tuple[Entry, Point, int]  # with the seed
TRIAL_HEADERS = ("row", "local_lr", "option", "value", "score", "machine")
RUN_HEADERS = (
    *("row", "seed", "local_lr", "option", "value", "machine", "seconds"),
    *("bytes_up", "bytes_down", "worst_decile", "test_accuracy"),
)


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

    @classmethod
    def of(cls, row: str, point: Point, outcome: Outcome) -> Trial:
        """Return the trial that a run is."""
        first, last = window_of(ROUNDS)
        window = [row["train_accuracy"] or 0.0 for row in outcome.rows[first - 1 : last]]
        score = 0.0 if outcome.diverged_at else float(f"{mean(window):.5f}")
        return cls(row, point, score, machine_of(outcome))


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
        seconds: training time with evaluations; None on a CPU.
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

    @classmethod
    def of(cls, row: str, seed: int, point: Point, worst: str, outcome: Outcome) -> BoardRun:
        """Return the judged run that a run is; `worst` is the split of the worst decile."""
        values = [row["test_accuracy"] for row in outcome.rows if row["test_accuracy"] is not None]
        last: Mapping[str, Any] = outcome.rows[-1] if outcome.rows else {}
        ended = outcome.diverged_at is None
        decile = float(f"{last[f'{worst}_accuracy_worst_decile']:.4f}") if ended else None
        sent = last.get("bytes_up"), last.get("bytes_down")
        seconds = float(f"{outcome.seconds:.1f}") if ended and on_gpu(outcome) else None
        about = (decile, *sent, seconds, machine_of(outcome))
        return cls(row, seed, point, tuple(float(f"{value:.4f}") for value in values), *about)


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
            for row in read_csv(folder / f"{task}-tuning.csv")
        ]
        return cls(task, folder, trials, [_run(row) for row in read_csv(folder / f"{task}.csv")])

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

    def complete(self, entries: Sequence[Entry], args: argparse.Namespace) -> None:
        """Tune rows and run their seeds, without what is stored; write both files."""
        board = TASKS[self.task]
        if args.restart:
            names = [entry.name for entry in entries]
            self.trials = [trial for trial in self.trials if trial.row not in names]
            self.runs = [run for run in self.runs if run.row not in names]

        def run(wanted: Sequence[Wanted], **settings: Any) -> Iterator[tuple[Wanted, Outcome]]:
            settings |= {"device": args.device, "precision": args.precision}
            grid = [e.experiment(self.task, point, seed, **settings) for e, point, seed in wanted]
            return zip(wanted, execute(grid, args, args.restart), strict=True)

        trials = [
            (entry, point, TUNING_SEED)
            for entry in entries
            for point in (entry.points(self.task) if board.tuned else ())
            if self.score(entry.name, point) is None
        ]
        first, last = window_of(ROUNDS)
        often = max(1, (first - 1) // 4), last - first + 1  # as in tuning
        for (entry, point, _), outcome in run(trials, rounds=ROUNDS, evaluate_every=often):
            self.trials.append(Trial.of(entry.name, point, outcome))
        self.write()
        judged = [
            (entry, best, seed)
            for entry in entries
            if (best := self.best(entry)) is not None
            for seed in sorted({*SEEDS} - {run.seed for run in self.judged(entry)})
        ]
        settings = {"rounds": board.rounds, "evaluate_every": board.evaluate_every}
        for (entry, point, seed), outcome in run(judged, by_client=True, **settings):
            old = (entry.name, seed)
            self.runs = [run for run in self.runs if (run.row, run.seed) != old]
            self.runs.append(BoardRun.of(entry.name, seed, point, board.worst, outcome))
        self.write()

    def write(self) -> None:
        """Write both files in the order of the protocol, whatever the order of execution."""
        rows = {name: k for k, name in enumerate(ENTRIES)}
        trials = sorted(self.trials, key=lambda t: (rows.get(t.row, len(rows)), *t.point.values()))
        runs = sorted(self.runs, key=lambda run: (rows.get(run.row, len(rows)), run.seed))
        if trials:
            lines = [(t.row, *_described(t.point), f"{t.score:.5f}", t.machine) for t in trials]
            write_csv(self.folder / f"{self.task}-tuning.csv", TRIAL_HEADERS, lines)
        if runs:
            write_csv(self.folder / f"{self.task}.csv", RUN_HEADERS, map(_row, runs))


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
    worst, seconds = (float(row[n]) if row[n] else None for n in ("worst_decile", "seconds"))
    up, down = (int(row[n]) if row[n] else None for n in ("bytes_up", "bytes_down"))
    values = tuple(map(float, row["test_accuracy"].split()))
    about = (worst, up, down, seconds, row["machine"])
    return BoardRun(row["row"], int(row["seed"]), _point(row), values, *about)
