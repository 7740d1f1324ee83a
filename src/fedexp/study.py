"""Studies from Python: `run`, `compare` and `tune`, and what they leave on the disk.

They execute the same runs as the command line, in the same folders: a run that one of them has
finished is found by the other. A task or an algorithm of your own needs no registration. Worker
processes import the file that defines it; one that cannot be imported (made in a notebook or inside
a function) runs in this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from torch import Tensor, nn

from fedexp.algorithms import Algorithm
from fedexp.analysis.plots import check_writable, comparison_figure, save
from fedexp.analysis.report import Filters, Targets, write_report
from fedexp.analysis.summary import Line, summarise
from fedexp.analysis.tables import comparison_numbers, comparison_table, render_table
from fedexp.distributed import ranks
from fedexp.engine.client_store import Location
from fedexp.errors import DivergedError, is_number, require, whole_number
from fedexp.options import split_task_options
from fedexp.references import refuse_while_importing
from fedexp.runs.checkpoint import from_bytes
from fedexp.runs.execute import execute, model_bytes, stop_request
from fedexp.runs.files import Row
from fedexp.runs.from_python import PathLike, Settings, prepared_run, prepared_runs
from fedexp.runs.journal import CHECKPOINT_EVERY, RunInterrupted
from fedexp.runs.loggers import Logger
from fedexp.runs.pool import run_all
from fedexp.runs.spec import Outcome, Run, Spec, file_name
from fedexp.runs.weights import CPU, module_of, module_with, run_weights
from fedexp.tasks.task import Task

if TYPE_CHECKING:
    import pandas

    from fedexp.tuning.search import Study as Search
    from fedexp.tuning.store import Trial

OnRow = Callable[[Spec, Row], None]


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run that is over: its rows, its model, and its folder.

    Attributes:
        run: what was run.
        outcome: its rows and how it ended.
    """

    run: Run
    outcome: Outcome

    def __repr__(self) -> str:
        spec, rows = self.run.spec, self.outcome.rows
        return (
            f"RunResult({spec.algorithm} on {spec.task}, seed {spec.seed}: {len(rows)} rounds, "
            f"{self.outcome.status}, folder={str(self.folder) if self.folder else None!r})"
        )

    @property
    def folder(self) -> Path | None:
        """The run folder; None if the run was not stored."""
        return self.outcome.folder

    @property
    def rows(self) -> list[Row]:
        """One row of numbers per round."""
        return self.outcome.rows

    @property
    def last(self) -> Row:
        """The row of the last round."""
        return self.outcome.rows[-1]

    def model(self) -> nn.Module:
        """Return the trained model, an `nn.Module` with the output weights, on the CPU."""
        if self.folder is None:
            assert self.outcome.state is not None
            weights = from_bytes(model_bytes(self.run, self.outcome.state), CPU)
        else:
            weights = run_weights(self.folder)
        return module_with(weights, module_of(self.run.task, self.run.spec.seed))

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return the rows as a pandas DataFrame; as a list of dicts without pandas."""
        return _frame(self.rows)


def run(
    task: Task | str,
    algorithm: Algorithm | str = "fedexp",
    *,
    seed: int = 0,
    runs: PathLike | None = "runs",
    restart: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    client_store: Location = "auto",
    loggers: Sequence[Logger] = (),
    on_round: Callable[[Row], None] = lambda row: None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Train with one algorithm; store the run, and resume or return a stored one.

    Args:
        task: a task, the name of one of the package, or a reference such as `study.py:task`.
        algorithm: a name takes the task's tuned values; an `Algorithm` is taken as it is; a
            reference such as `study.py:mine` is an algorithm of your own.
        seed: seed of the initial weights, the cohorts and the batches.
        runs: folder of all runs; None stores nothing.
        restart: discard what is stored of this run.
        checkpoint_every: seconds between checkpoints.
        client_store: where client state is stored, see `simulate`.
        loggers: notified of every round.
        on_round: called with the row of every round, stored ones first.
        settings: see `Settings`.

    >>> result = run("toy", "fedexp", runs=None, rounds=30)
    >>> result.last["train_loss"] < 1e-3
    True
    """
    refuse_while_importing("fedexp.run")
    _check_storage(runs, checkpoint_every)
    require(callable(on_round), f"on_round is {on_round!r}; give a function of a row")
    _check_mode([algorithm], settings)
    prepared = prepared_run(task, algorithm, seed, settings, runs)
    with stop_request(listen=runs is not None) as request:
        try:
            outcome = execute(
                prepared.spec,
                None if runs is None else Path(runs),
                lambda spec, row: on_round(row),
                run=prepared,
                ranks=ranks(),
                restart=restart,
                checkpoint_every=checkpoint_every,
                client_store=client_store,
                loggers=loggers,
                stop=request,
            )
        except RunInterrupted as stopped:
            raise KeyboardInterrupt(f"{stopped}; the same call continues") from None
    if outcome.diverged_at is not None:
        raise DivergedError(outcome.diverged_at, outcome.reason)
    return RunResult(prepared, outcome)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several algorithms over several seeds.

    Attributes:
        runs: one run of each algorithm, prepared.
        outcomes: of all runs, seeds of an algorithm together.
        target: value of the metric that counts as reached.
        smooth: final values and curves are averaged over this many rounds.
        further: further targets, which the table, the figure and the report have as well.
    """

    runs: list[Run]
    outcomes: list[Outcome]
    target: float | None
    smooth: int = 1
    further: tuple[float, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(run.spec.algorithm for run in self.runs)
        return f"Comparison({names} on {self._first.spec.task}: {len(self.outcomes)} runs)"

    @property
    def metric(self) -> str:
        """The record field that the task is judged by."""
        return self._first.task.metric

    @cached_property
    def lines(self) -> list[Line]:
        """One line per algorithm: rounds to the target, final values, speed-up over FedAvg."""
        return self._lines_to(self.target)

    def _lines_to(self, target: float | None) -> list[Line]:
        higher = self._first.task.goal.higher
        return summarise(self.outcomes, self.metric, target, self.smooth, higher)

    def table(self, format: str = "text") -> str:
        """Return the table of the comparison: "text", "markdown", "csv" or "latex"."""
        rounds, higher = self._first.rounds, self._first.task.goal.higher
        further = {each: self._lines_to(each) for each in self.further}
        if format == "csv":
            return render_table(format, *comparison_numbers(self.lines, further))
        settings = (self.smooth, higher, further)
        cells = comparison_table(self.lines, self.metric, self.target, rounds, *settings)
        return render_table(format, *cells)

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return the rows of all runs, with their algorithm and seed; see `RunResult.frame`."""
        named = [(o, {"algorithm": o.spec.algorithm, "seed": o.spec.seed}) for o in self.outcomes]
        return _frame([{**names, **row} for outcome, names in named for row in outcome.rows])

    def plot(self, path: PathLike) -> Path:
        """Draw the metric, the training loss and the server step size into a file."""
        picture = Path(path)
        check_writable(picture)
        title = f"{self._first.spec.task}: {self._first.rounds} rounds, {self._seeds()}"
        figure = comparison_figure(
            self.outcomes, self.metric, self.target, title, self.smooth, self.further
        )
        save(figure, picture)
        return picture

    def report(
        self,
        path: PathLike = "report.html",
        *,
        metrics: Sequence[str] = (),
        filters: Filters | None = None,
    ) -> Path:
        """Write the runs as one HTML page that works offline.

        Args:
            path: the page.
            metrics: record fields to draw instead of the default ones.
            filters: which of the runs to show, see `fedexp.analysis.report.Filters`.
        """
        folders = [outcome.folder for outcome in self.outcomes if outcome.folder is not None]
        require(bool(folders), "a report needs stored runs; leave runs=None out")
        targets = Targets(() if self.target is None else (self.target, *self.further))
        return write_report(
            folders, Path(path), metrics=metrics, targets=targets, filters=filters
        ).page

    @property
    def _first(self) -> Run:
        return self.runs[0]

    def _seeds(self) -> str:
        count = len(self.outcomes) // len(self.runs)
        return f"{count} seed{'s' if count > 1 else ''}"


def compare(
    task: Task | str,
    algorithms: Iterable[Algorithm | str] = ("fedavg", "fedexp"),
    *,
    seeds: int | Sequence[int] = 1,
    jobs: int = 1,
    runs: PathLike | None = "runs",
    target: float | Sequence[float] | None = None,
    smooth: int = 1,
    restart: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    on_round: OnRow = lambda spec, row: None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Run several algorithms over several seeds; stored runs are not run again.

    Args:
        task: see `run`.
        algorithms: names, algorithms or references; see `run`.
        seeds: how many, from 0, or a list of them.
        jobs: runs at a time, each in a process with one thread if there are several.
        runs: folder of all runs; None stores nothing.
        target: value of the task's metric that counts as reached, or several; the task's own when
            None.
        smooth: average final values and curves over this many rounds.
        restart: discard what is stored of these runs.
        checkpoint_every: seconds between checkpoints.
        on_round: called with the spec and the row of every round.
        settings: see `Settings`; `options` may have `name:key` for one algorithm.

    >>> study = compare("toy", ["fedavg", "fedexp"], runs=None, rounds=30)
    >>> [line.algorithm for line in study.lines]
    ['fedavg', 'fedexp']
    """
    refuse_while_importing("fedexp.compare")
    _check_storage(runs, checkpoint_every)
    require(
        not isinstance(algorithms, str | Algorithm),
        f"compare takes a list of algorithms, e.g. ['fedavg', 'fedexp'], not {algorithms!r}",
    )
    _check_count("jobs", jobs)
    require(jobs >= 1, f"jobs must be at least 1, not {jobs}")
    chosen = list(algorithms)
    require(bool(chosen), "compare needs at least one algorithm, e.g. ['fedavg', 'fedexp']")
    if not isinstance(seeds, Iterable):
        _check_count("seeds", seeds)
    seeds = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    listed = seeds if isinstance(seeds, Iterable) else range(seeds)
    numbers = [whole_number("a seed", seed, 0) for seed in listed]
    require(bool(numbers), "compare needs at least one seed")
    require(len({*numbers}) == len(numbers), f"a seed is given twice: {numbers}")
    _check_mode(chosen, settings)
    firsts = prepared_runs(task, chosen, numbers[0], settings, runs)
    several = isinstance(target, Sequence | np.ndarray) and not isinstance(target, str)
    goals: Any = target if several else [target]
    given = [firsts[0].task.checked_target(each, "target") for each in goals]
    wanted = [each for each in given if each is not None]
    specs = [replace(first.spec, seed=seed) for first in firsts for seed in numbers]
    root = None if runs is None else Path(runs)
    with stop_request(listen=root is not None) as request:
        try:
            outcomes = run_all(
                specs,
                jobs,
                on_round,
                root,
                ranks=ranks(),
                checkpoint_every=checkpoint_every,
                stop=request,
                restart=restart,
                built=firsts[0],
            )
        except RunInterrupted:
            raise KeyboardInterrupt("stopped; the same call continues") from None
    first = wanted[0] if wanted else firsts[0].task.target
    return Comparison(firsts, outcomes, first, smooth, tuple(wanted[1:]))


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of a search: its trials, best first.

    Attributes:
        study: what was searched, and where the scores are stored.
        trials: all trials, best first.
    """

    study: Search
    trials: list[Trial]

    def __repr__(self) -> str:
        spec = self.study.run.spec
        count = f"{len(self.trials)} trials"
        return f"Tuning({spec.algorithm} on {spec.task}: {count}, best {self.best})"

    @property
    def best(self) -> dict[str, float]:
        """The best values by option; pass them on as `options=`."""
        require(
            any(
                math.isfinite(each.result.score) and each.result.diverged_at is None
                for each in self.trials
            ),
            f"no trial has a finite {self.study.metric}, so none is the best; widen the grid, or "
            "check the metric",
        )
        return dict(self.trials[0].point)

    @property
    def score(self) -> float:
        """The score of the best trial: `study.metric`, averaged over the last 10 rounds."""
        return self.trials[0].result.score

    def table(self, format: str = "text") -> str:
        """Return the ten best trials, or all of them as "csv"."""
        from fedexp.tuning.results import best_table

        return render_table(format, *best_table([(self.study, self.trials)], format == "csv"))

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return one row per trial: its values and its result; see `RunResult.frame`."""
        return _frame([{**trial.point, **vars(trial.result)} for trial in self.trials])

    def plot(self, path: PathLike) -> Path:
        """Draw the scores over two options as a heat map."""
        from fedexp.tuning.results import tuning_figure

        require(len(self.study.values) == 2, "a picture needs a search over two options")
        picture = Path(path)
        check_writable(picture)
        save(tuning_figure(self.study, self.trials), picture)
        return picture


def tune(
    task: Task | str,
    algorithm: Algorithm | str = "fedexp",
    grid: Mapping[str, Sequence[float]] | None = None,
    *,
    protocol: Literal["paper", "free"] = "paper",
    trials: int = 30,
    seed: int = 0,
    jobs: int = 1,
    store: PathLike | None = None,
    on_round: Callable[[Mapping[str, float], Row], None] = lambda values, row: None,
    **settings: Unpack[Settings],
) -> Tuning:
    """Search for the best values of options; stored trials are not run again.

    A trial is a run of 50 rounds (or `rounds=`), scored by the training accuracy or loss, averaged
    over the last 10 (docs/tuning.md); a task whose goal is another metric is scored by that one.

    Args:
        task: see `run`.
        algorithm: see `run`.
        grid: values by option, e.g. {"mu": [0.01, 0.1], "local.lr": [0.1, 1.0]}; the paper's
            grid when None.
        protocol: "paper" for a grid, or "free" for Optuna's TPE over ranges, with pruning.
        trials: number of trials of a free search.
        seed: seed of all trials.
        jobs: trials at a time, each in a process with one thread if there are several.
        store: SQLite file of the scores; `tune-TASK.db` when None.
        on_round: called with the values and every row of a trial.
        settings: see `Settings`.
    """
    from fedexp.tuning.grids import (
        check_none_fixed,
        checked_grid,
        free_ranges,
        paper_grid,
        without_fixed,
    )
    from fedexp.tuning.search import ROUNDS, Study, TrialRunner, check_study
    from fedexp.tuning.search import tune as search

    refuse_while_importing("fedexp.tune")
    require(grid is None or protocol == "paper", "give a grid, or protocol='free', not both")
    require(settings.get("stop_at") is None, "trials run to their end; leave stop_at out")
    require(
        settings.get("evaluate_every") is None,
        "trials are evaluated as their score needs it; leave evaluate_every out",
    )
    _check_count("jobs", jobs)
    require(jobs >= 1, f"jobs must be at least 1, not {jobs}")
    _check_mode([algorithm], settings)
    own: Settings = {**settings, "rounds": settings.get("rounds") or ROUNDS}
    prepared = prepared_run(task, algorithm, seed, own)
    if grid is not None:  # over values of an `Algorithm`, but not over options
        values = check_none_fixed(checked_grid(grid, prepared.setup), settings.get("options") or {})
    else:
        ranges = free_ranges if protocol == "free" else paper_grid
        _, fixed = split_task_options(dict(prepared.spec.options))
        values = without_fixed(ranges(prepared.setup, prepared.task.sums), fixed)
    if isinstance(algorithm, Algorithm) and "server.eps" in values:
        # an eps has the unit of the algorithm that was given, not that of its name
        unit = {"server.eps_mode": prepared.setup.options()["server.eps_mode"]}
        own["options"] = {**(settings.get("options") or {}), **unit}
        prepared = prepared_run(task, algorithm, seed, own, built=prepared.task)
    path = Path(f"tune-{file_name(prepared.spec.task)}.db" if store is None else store)
    study = Study(prepared, protocol, values, path, trials)
    check_study(study)
    with stop_request() as request:
        runner = TrialRunner(jobs, ranks(), lambda left: nullcontext(on_round), stop=request)
        try:
            return Tuning(study, search(study, runner))
        except RunInterrupted:
            raise KeyboardInterrupt("stopped; the same call continues") from None


def _check_storage(runs: Any, checkpoint_every: Any) -> None:
    """Refuse a folder that is no path, and a time that is no number."""
    path = runs is None or isinstance(runs, str | os.PathLike)
    require(path, f"runs is {runs!r}; name a folder, or None to store nothing")
    valid = is_number(checkpoint_every) and checkpoint_every >= 0
    require(valid, f"checkpoint_every is a number of seconds, not {checkpoint_every!r}")


def _check_mode(algorithms: Sequence[Algorithm | str], settings: Settings) -> None:
    """Refuse a mode that no algorithm is given by a name for."""
    mode = settings.get("mode") or "paper"
    require(
        mode == "paper" or any(isinstance(each, str) and ":" not in each for each in algorithms),
        f"mode {mode!r} has no effect on an Algorithm, which is taken as it is; give its name, or "
        "leave mode out",
    )


def _check_count(name: str, count: object) -> None:
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    require(whole, f"{name} must be a whole number, not {count!r}")


def _frame(rows: Sequence[Row]) -> pandas.DataFrame | list[Row]:
    try:
        import pandas
    except ImportError:
        return list(rows)
    return pandas.DataFrame(rows)
