"""`run`, `compare` and `tune`: what Python and the command line do with experiments.

A run that one of them has finished is found by the others. A task or an algorithm of your own needs
no registration. Worker processes import the file that defines it; one that cannot be imported (made
in a notebook or inside a function) runs in this process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from torch import Tensor, nn

from fedexp.algorithms import Algorithm
from fedexp.analysis.plots import check_writable, comparison_figure, save
from fedexp.analysis.report import Filters, Targets, write_report
from fedexp.analysis.summary import Line, summarise
from fedexp.analysis.tables import comparison_numbers, comparison_table, render_table
from fedexp.data.sources.image_folder import available_cores
from fedexp.distributed import ranks
from fedexp.engine.client_store import Location
from fedexp.errors import (
    DivergedError,
    NonFiniteUpdateWarning,
    is_number,
    remedies,
    require,
    whole_number,
)
from fedexp.experiment import (
    CHECKPOINT_EVERY,
    Experiment,
    Logger,
    PathLike,
    Resources,
    Row,
    Settings,
    check_names,
    experiments,
)
from fedexp.objective import LeastSquares
from fedexp.optional import data_frame
from fedexp.references import refuse_while_importing
from fedexp.runs.execute import StopRequest, Storage, execute, model_bytes, stop_request
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.pool import Shard, jobs_for, run_all, run_queue, runs_per_rank, stored_outcomes
from fedexp.runs.spec import OnRound, Outcome, folder_of
from fedexp.runs.weights import CPU, module_of, module_with, run_weights, stored_start
from fedexp.runs.workers import Execution
from fedexp.storage import finite, from_bytes
from fedexp.tasks.task import Task
from fedexp.tuning.results import Tuning
from fedexp.tuning.search import FREE_TRIALS, QUEUES, OnTrialRow, Protocol, Search

if TYPE_CHECKING:
    import pandas

QUICK_ROUNDS = 1000
REMEDIES = {
    "damaged": "fix it, or start over with restart=True",
    "content": "restart=True discards it and runs it again",
    "lock": "choose a folder on another disk, or runs=None",
    "deterministic": "leave deterministic out, or train on the CPU",
    "worker": "try jobs=1",
}


@dataclass(frozen=True)
class Grid:
    """The runs that are about to be executed, for a progress bar.

    Attributes:
        task: name of the task.
        runs: how many this process is going to report.
        rounds: of each.
        metric: of the task's goal.
    """

    task: str
    runs: int
    rounds: int
    metric: str


Progress = Callable[[Grid], AbstractContextManager[OnRound]]


class Interrupted(KeyboardInterrupt):
    """Runs stopped on request; the same call continues them.

    Attributes:
        status: the exit status of a process that the signal ended.
        round: the last round of a single run.
    """

    def __init__(self, status: int, round: int = 0) -> None:
        after = f" after round {round}" if round else ""
        super().__init__(f"stopped{after}; the same call continues")
        self.status, self.round = status, round


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run that is over: its rows, its model, and its folder.

    Attributes:
        experiment: what was run.
        outcome: its rows and how it ended.
    """

    experiment: Experiment
    outcome: Outcome

    def __repr__(self) -> str:
        spec, rows = self.outcome.spec, self.outcome.rows
        return (
            f"RunResult({spec['algorithm']} on {spec['task']}, seed {spec['seed']}: {len(rows)} "
            f"rounds, {self.outcome.status}, folder={str(self.folder) if self.folder else None!r})"
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
            weights = from_bytes(model_bytes(self.experiment, self.outcome.state), CPU)
        else:
            weights = run_weights(self.folder)
        return module_with(weights, module_of(self.experiment.problem, self.experiment.seed))

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return the rows as a pandas DataFrame; as a list of dicts without pandas."""
        return data_frame(self.rows)


def run(
    task: Experiment | Task | str,
    algorithm: Algorithm | str = "fedexp",
    *,
    seed: int = 0,
    runs: PathLike | None = "runs",
    folder: PathLike | None = None,
    restart: bool = False,
    reopen: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    client_store: Location = "auto",
    loggers: Sequence[Logger] = (),
    on_round: Callable[[Row], None] = lambda row: None,
    on_open: Callable[[Path, int, bool], None] = lambda folder, rounds, over: None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Train with one algorithm; store the run, and resume or return a stored one.

    Args:
        task: a task, the name of one of the package, or a reference such as `study.py:task`; or an
            `Experiment`, which has algorithm, seed and settings.
        algorithm: a name takes the task's tuned values; an `Algorithm` is taken as it is; a
            reference such as `study.py:mine` is an algorithm of your own.
        seed: seed of the initial weights, the cohorts and the batches.
        runs: folder of all runs; None stores nothing.
        folder: the run's own folder, instead of one in `runs`.
        restart: discard what is stored of this run.
        reopen: continue a run that diverged from its last checkpoint.
        checkpoint_every: seconds between checkpoints.
        client_store: where client state is stored, see `simulate`.
        loggers: notified of every round.
        on_round: called with the row of every round, stored ones first.
        on_open: called with the folder, the number of rounds it holds, and whether the run is over.
        settings: fields of `Experiment`.

    >>> result = run("toy", "fedexp", runs=None, rounds=30)
    >>> result.last["train_loss"] < 1e-3
    True
    """
    refuse_while_importing("fedexp.run")
    _check_storage(runs, checkpoint_every)
    require(callable(on_round), f"on_round is {on_round!r}; give a function of a row")
    experiment = _experiment(task, algorithm, seed, settings, runs)
    path = None if folder is None else Path(folder)
    if path is None and runs is not None:
        path = folder_of(experiment, Path(runs))
    with _stoppable(path is not None, is_single=True) as request:
        storage = Storage(path, restart, reopen, on_open)
        resources = Resources(
            client_store, checkpoint_every=checkpoint_every, stop=request, loggers=loggers
        )
        outcome = execute(experiment, storage, lambda _, row: on_round(row), resources, ranks())
    if outcome.diverged_at is not None:
        raise DivergedError(outcome.diverged_at, outcome.reason)
    return RunResult(experiment, outcome)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several algorithms over several seeds.

    Attributes:
        experiments: one of each algorithm.
        outcomes: of all runs, seeds of an algorithm together.
        target: value of the metric that counts as reached.
        smooth: final values and curves are averaged over this many rounds.
        further: further targets, which the table, the figure and the report have as well.
    """

    experiments: list[Experiment]
    outcomes: list[Outcome]
    target: float | None
    smooth: int = 1
    further: tuple[float, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(each.names.algorithm for each in self.experiments)
        return f"Comparison({names} on {self._name}: {len(self.outcomes)} runs)"

    @property
    def metric(self) -> str:
        """The record field that the task is judged by."""
        return self._task.metric

    @cached_property
    def lines(self) -> list[Line]:
        """One line per algorithm: rounds to the target, final values, speed-up over FedAvg."""
        return self._by_target[self.target]

    @cached_property
    def _by_target(self) -> dict[float | None, list[Line]]:
        how = (self.smooth, self._task.goal.higher)
        targets = (self.target, *self.further)
        return {each: summarise(self.outcomes, self.metric, each, *how) for each in targets}

    def table(self, format: str = "text") -> str:
        """Return the table of the comparison: "text", "markdown", "csv" or "latex"."""
        if format == "csv":
            return render_table(format, *comparison_numbers(self._by_target))
        how = (self.experiments[0].length, self.smooth, self._task.goal.higher)
        return render_table(format, *comparison_table(self._by_target, self.metric, *how))

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return the rows of all runs, with their algorithm and seed; see `RunResult.frame`."""
        named = [(each, {"algorithm": each.algorithm, "seed": each.seed}) for each in self.outcomes]
        return data_frame([{**names, **row} for outcome, names in named for row in outcome.rows])

    def plot(self, path: PathLike) -> Path:
        """Draw the metric, the training loss and the server step size into a file."""
        picture = Path(path)
        check_writable(picture)
        figure = comparison_figure(
            self.outcomes, self.metric, self.target, self.title, self.smooth, self.further
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
    def title(self) -> str:
        """The task, the number of rounds, of clients per round and of seeds."""
        first, train = self.experiments[0], self._task.train
        rule = first.cohort_rule
        cohort = "some" if rule.choose else rule.sample(0, 1, train).size
        seeds = len(self.outcomes) // len(self.experiments)
        return (
            f"{self._name}: {first.length} rounds, {cohort} of {train.clients} clients per "
            f"round, {seeds} seed{'s' * (seeds > 1)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the lines of the table as plain values."""
        rounds, seeds = self.experiments[0].length, len(self.outcomes) // len(self.experiments)
        head = {"task": self._name, "metric": self.metric, "target": self.target}
        further = [
            {"target": target, "algorithms": list(map(_plain_line, self._by_target[target]))}
            for target in self.further
        ]
        lines = {"rounds": rounds, "seeds": seeds, "algorithms": list(map(_plain_line, self.lines))}
        return {**head, **lines, **({"further": further} if further else {})}

    @property
    def _name(self) -> str:
        return self.experiments[0].names.task

    @property
    def _task(self) -> Task:
        return self.experiments[0].problem


def _plain_line(line: Line) -> dict[str, Any]:
    return dict(finite({**vars(line), "mean_rounds": line.mean_rounds}))


def compare(
    task: Task | str,
    algorithms: Iterable[Algorithm | str] = ("fedavg", "fedexp"),
    *,
    seeds: int | Sequence[int] = 1,
    jobs: int | None = 1,
    runs: PathLike | None = "runs",
    target: float | Sequence[float] | None = None,
    smooth: int = 1,
    restart: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    on_round: OnRound = lambda experiment, row: None,
    progress: Progress | None = None,
    shard: Shard | None = None,
    on_busy: Callable[[Experiment], None] | None = None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Run several algorithms over several seeds; stored runs are not run again.

    Args:
        task: see `run`.
        algorithms: names, algorithms or references; see `run`.
        seeds: how many, from 0, or a list of them.
        jobs: runs at a time, each in a process with one thread if there are several; None for one
            per core.
        runs: folder of all runs; None stores nothing.
        target: value of the task's metric that counts as reached, or several; the task's own when
            None.
        smooth: average final values and curves over this many rounds.
        restart: discard what is stored of these runs.
        checkpoint_every: seconds between checkpoints.
        on_round: called with the experiment and the row of every round.
        progress: called with the runs that are about to be executed; the context manager that it
            returns gives the function to be called in the place of `on_round`.
        shard: only this share of the runs, for a job array. The comparison has the outcomes that
            are stored by then.
        on_busy: called with a run that another process is executing; None raises an error.
        settings: fields of `Experiment`; `options` may have `name:key` for one algorithm.

    >>> study = compare("toy", ["fedavg", "fedexp"], runs=None, rounds=30)
    >>> [line.algorithm for line in study.lines]
    ['fedavg', 'fedexp']
    """
    refuse_while_importing("fedexp.compare")
    _check_storage(runs, checkpoint_every)
    check_names(settings)
    require(
        not isinstance(algorithms, str | Algorithm),
        f"compare takes a list of algorithms, e.g. ['fedavg', 'fedexp'], not {algorithms!r}",
    )
    chosen = list(algorithms)
    require(bool(chosen), "compare needs at least one algorithm, e.g. ['fedavg', 'fedexp']")
    seeds = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    listed = seeds if isinstance(seeds, Iterable) else range(whole_number("seeds", seeds, 1))
    numbers = [whole_number("a seed", seed, 0) for seed in listed]
    require(bool(numbers), "compare needs at least one seed")
    require(len({*numbers}) == len(numbers), f"a seed is given twice: {numbers}")
    _check_mode(chosen, settings)
    if (start := settings.get("start")) is not None:
        settings["start"] = stored_start(start, runs)
    firsts = experiments(task, chosen, numbers[0], settings)
    several = isinstance(target, Sequence | np.ndarray) and not isinstance(target, str)
    goals: Any = target if several else [target]
    checked = [firsts[0].problem.checked_target(each, "target") for each in goals]
    targets = [each for each in checked if each is not None]
    outcomes = run_grid(
        [
            first if seed == first.seed else first.replace(seed=seed)
            for first in firsts
            for seed in numbers
        ],
        jobs=jobs,
        runs=runs,
        progress=progress or (lambda grid: nullcontext(on_round)),
        restart=restart,
        checkpoint_every=checkpoint_every,
        shard=shard,
        on_busy=on_busy,
    )
    first = targets[0] if targets else firsts[0].problem.target
    return Comparison(firsts, outcomes, first, smooth, tuple(targets[1:]))


def run_grid(
    grid: Sequence[Experiment],
    *,
    jobs: int | None,
    runs: PathLike | None,
    progress: Progress,
    restart: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    shard: Shard | None = None,
    on_busy: Callable[[Experiment], None] | None = None,
) -> list[Outcome]:
    """Execute experiments, or one share of them; return the outcomes of all that are over."""
    share = list(grid) if shard is None else shard.of(grid)
    first, group = grid[0], ranks()
    jobs = _checked_jobs(jobs, first)
    root = None if runs is None else Path(runs)
    about = Grid(
        first.names.task, runs_per_rank(len(share), group), first.length, first.problem.metric
    )
    with _stoppable(root is not None) as request, progress(about) as on_round:
        outcomes = run_all(
            share,
            jobs,
            on_round,
            root,
            ranks=group,
            checkpoint_every=checkpoint_every,
            stop=request,
            on_busy=on_busy,
            restart=restart,
        )
    if shard is None or root is None:
        return outcomes
    others = dict(stored_outcomes(grid, root, skip_others=restart))
    return [others[k] for k in sorted(others)]


@contextmanager
def _stoppable(is_stored: bool, is_single: bool = False) -> Iterator[StopRequest]:
    """Stop stored runs on a signal, which raises `Interrupted`; name the remedies of errors."""
    with stop_request(listen=is_stored) as request, remedies(REMEDIES):
        try:
            yield request
        except RunInterrupted as stopped:
            raise Interrupted(request.status, stopped.round if is_single else 0) from None


def workers_for(first: Experiment) -> int:
    """Return how many runs suit a device at a time: one per core of a CPU, one on a GPU.

    One too for least squares, which end before workers start.
    """
    if isinstance(first.problem.objective, LeastSquares) and first.length <= QUICK_ROUNDS:
        return 1
    return available_cores() if first.device in (None, "cpu") else 1


TrialProgress = Callable[[Grid], AbstractContextManager[OnTrialRow]]


def tune(
    task: Experiment | Task | str,
    algorithm: Algorithm | str = "fedexp",
    grid: Mapping[str, Sequence[float]] | None = None,
    *,
    protocol: Protocol = "paper",
    trials: int = FREE_TRIALS,
    seed: int = 0,
    jobs: int | None = 1,
    runs: PathLike | None = "runs",
    on_round: OnTrialRow = lambda values, row: None,
    progress: TrialProgress | None = None,
    on_wait: Callable[[], None] = lambda: None,
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
        protocol: "paper" for a grid, "free" for Optuna's TPE over ranges, with pruning, or
            "epsilon" for the paper's rule of thumb: raise eps until the score drops.
        trials: number of trials of a free search.
        seed: seed of all trials.
        jobs: trials at a time, see `compare`.
        runs: folder of all runs; trials are stored in its folder `trials`, without weights. None
            stores nothing.
        on_round: called with the values and every row of a trial that is run.
        progress: called with the trials that are about to be executed, see `compare`.
        on_wait: called when all trials that are left are running in other processes.
        settings: fields of `Experiment`.

    >>> tuning = tune("toy", "fedavg", {"lr": [1.0, 1.2, 1.4]}, rounds=5, runs=None)
    >>> tuning.best
    {'server.lr': 1.0}
    """
    refuse_while_importing("fedexp.tune")
    _check_storage(runs)
    experiment = _experiment(task, algorithm, seed, settings, runs)
    search = Search.of(experiment, grid, protocol, trials)
    show = progress or (lambda grid: nullcontext(on_round))
    return run_search(search, jobs=jobs, runs=runs, progress=show, on_wait=on_wait)


def run_search(
    search: Search,
    *,
    jobs: int | None,
    runs: PathLike | None,
    progress: TrialProgress,
    on_wait: Callable[[], None],
) -> Tuning:
    """Run the trials of a search that are not stored; see `tune`."""
    base, group = search.base, ranks()
    jobs = _checked_jobs(jobs, base)
    root = None if runs is None else Path(runs)
    queue = QUEUES[search.protocol](search, root)
    # the folder may change between the reads of two ranks; one that stores nothing shares all
    left = queue.count_left() if group is None else group.broadcast(queue.count_left())
    alone = left if root is not None or group is None else min(left, 1)
    how = Execution(queue.folder, skip_busy=True, weights=False)
    about = Grid(base.names.task, runs_per_rank(left, group), base.length, search.metric)
    with _stoppable(root is not None) as request, warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteUpdateWarning)  # it shows in the score
        if left:
            with progress(about) as queue.on_row:
                jobs = jobs_for([base], jobs)
                run_queue(queue, alone, jobs, how, ranks=group, stop=request, on_wait=on_wait)
    done = queue.trials() if group is None else group.broadcast(queue.trials())
    return Tuning(search, done)


def _experiment(
    task: Experiment | Task | str,
    algorithm: Algorithm | str,
    seed: int,
    settings: Settings,
    runs: PathLike | None,
) -> Experiment:
    """Return the experiment of a call, which starts from a file if from any weights.

    One that is given has its settings.
    """
    check_names(settings)
    if isinstance(task, Experiment):
        require(not settings, "an Experiment has its settings; change them by its `replace`")
        experiment = task
    else:
        _check_mode([algorithm], settings)
        experiment = Experiment(task, algorithm, seed, **settings)
    if experiment.start is None:
        return experiment
    return experiment.replace(start=stored_start(experiment.start, runs))


def _check_storage(runs: Any, checkpoint_every: Any = 0) -> None:
    """Refuse a folder that is not a path, and a time that is not a number."""
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


def _checked_jobs(jobs: int | None, first: Experiment) -> int:
    """Return how many runs to execute at a time."""
    return workers_for(first) if jobs is None else whole_number("jobs", jobs, 1)
