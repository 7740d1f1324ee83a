"""The measures of the leaderboard: one `Cell` per row and task, a function of stored runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, stdev
from typing import Literal

from fedexp.runs import StoredRun
from fedexp.tasks.recipe import PAPER_TRAINING
from tools.grid import by_round, crossings
from tools.leaderboard.protocol import ENTRIES, LAST, SEEDS, TASKS, Entry, Point
from tools.leaderboard.runs import BoardRun, Store

Crossing = Literal["first", "smoothed"]
Board = dict[tuple[str, str], "Cell"]  # by task and row


@dataclass(frozen=True)
class Cell:
    """The judged runs of a row on a task, one per seed.

    Attributes:
        task: name of the task.
        entry: the row.
        runs: its runs, by seed; at least one.
        score: of its point in tuning; None on a task that is not tuned.
    """

    task: str
    entry: Entry
    runs: tuple[BoardRun, ...]
    score: float | None = None

    @property
    def point(self) -> Point:
        return self.runs[0].point

    def crossings(self, target: int, crossing: Crossing = "smoothed") -> list[int]:
        """Return the rounds to the first (0) or second (1) target of the seeds that reach it."""
        board = TASKS[self.task]
        curves = (by_round(run.values, board.evaluate_every) for run in self.runs)
        both = [crossings(curve, board.targets[target]) for curve in curves]
        hits = (smooth if crossing == "smoothed" else first for first, smooth in both)
        return [rounds for rounds in hits if rounds is not None]

    def rounds(self, target: int, crossing: Crossing = "smoothed") -> float | None:
        """Return the mean rounds to a target; None unless every seed reaches it."""
        found = self.crossings(target, crossing)
        return mean(found) if len(found) == len(self.runs) else None

    @cached_property
    def finals(self) -> list[float]:
        """The mean of the last evaluations of each seed that did not diverge."""
        board = TASKS[self.task]
        whole = board.rounds // board.evaluate_every
        return [mean(run.values[-LAST:]) for run in self.runs if len(run.values) == whole]

    @property
    def diverged(self) -> int:
        """The number of seeds that diverged."""
        return len(self.runs) - len(self.finals)

    @property
    def final(self) -> float | None:
        """The mean final accuracy; None if a seed diverged."""
        return None if self.diverged else mean(self.finals)

    @property
    def spread(self) -> float | None:
        """The standard deviation of the final accuracy over seeds."""
        return stdev(self.finals) if len(self.finals) > 1 else None

    @property
    def worst(self) -> float | None:
        """The mean accuracy of the worst decile of clients; None if a seed has none."""
        values = [run.worst for run in self.runs if run.worst is not None]
        return mean(values) if len(values) == len(self.runs) else None

    @property
    def sent(self) -> tuple[int, int] | None:
        """The bytes of a round, up and down; None where they are not known."""
        sent = ((r.bytes_up, r.bytes_down) for r in self.runs if r.bytes_up and r.bytes_down)
        return next(sent, None)

    @property
    def bytes_to_target(self) -> float | None:
        """The bytes sent in both directions up to the first target."""
        rounds, sent = self.rounds(0), self.sent
        return None if rounds is None or sent is None else rounds * sum(sent)

    @property
    def seconds(self) -> float | None:
        """The median wall time of a run on a GPU."""
        values = [run.seconds for run in self.runs if run.seconds is not None]
        return median(values) if values else None

    def edges(self) -> set[str]:
        """Return the tuned options whose value is at the end of the grid."""
        points = self.entry.points(self.task)
        ends = {name: {p[name] for p in (points[0], points[-1])} for name in self.point}
        return {n for n, value in self.point.items() if len(points) > 1 and value in ends[n]}


def load_board(folder: Path, archived: Sequence[StoredRun] = ()) -> Board:
    """Return the cells that have runs, in the order of the protocol.

    Args:
        folder: where the CSV files of the leaderboard are, which may be missing.
        archived: runs of the archive, of which those count that have the settings of a cell on a
            task that is not tuned, for seeds that the leaderboard has not run itself.
    """
    board: Board = {}
    for task in TASKS:
        store = Store.load(task, folder)
        for entry in ENTRIES.values():
            if task not in entry.centres:
                continue
            runs = {run.seed: run for run in archived_runs(archived, entry, task)}
            runs |= {run.seed: run for run in store.judged(entry)}
            if runs:
                judged = tuple(runs[seed] for seed in sorted(runs))
                score = store.score(entry.name, judged[0].point)
                board[task, entry.name] = Cell(task, entry, judged, score)
    return board


def archived_runs(archived: Sequence[StoredRun], entry: Entry, task: str) -> list[BoardRun]:
    """Return the archived runs that have exactly the settings of a row; none on a tuned task."""
    board = TASKS[task]
    if board.tuned:
        return []
    (point,) = entry.points(task)
    setup = entry.setup(PAPER_TRAINING, task, point)
    expected = {
        "task": task,
        "algorithm": entry.algorithm,
        "rounds": board.rounds,
        "cohort": board.cohort,
        "evaluate_every": board.evaluate_every,
    }
    found = []
    for run in archived:
        spec = run.spec
        if any(spec.get(name) != value for name, value in expected.items()):
            continue
        if run.result is None or spec["mode"] == "authors-code":
            continue
        if spec["seed"] not in SEEDS or any(name.startswith("task.") for name in spec["set"]):
            continue
        if setup.with_options(spec["options"]).options() != setup.options():
            continue
        values = [row.get("test_accuracy") for row in run.rows]
        known = tuple(float(f"{value:.4f}") for value in values if value is not None)
        found.append(BoardRun(entry.name, spec["seed"], point, known, machine="archive"))
    return found
