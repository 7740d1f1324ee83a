"""Studies from Python: `run`, `compare` and `tune`, and what they leave on the disk.

They execute the same runs as the command line, in the same folders: a run that one of them has
finished is found by the other. A task or an algorithm of your own needs no registration. Worker
processes import the file that defines it; one that cannot be imported (made in a notebook or inside
a function) runs in this process.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from fedexp.algorithms import ALGORITHMS, Algorithm
from fedexp.analysis.plots import check_writable, comparison_figure, save
from fedexp.analysis.report import Filters, Targets, write_report
from fedexp.analysis.summary import Line, summarise
from fedexp.analysis.tables import comparison_numbers, comparison_table, render_table
from fedexp.distributed import ranks
from fedexp.engine import EngineName, Record, SimulationState
from fedexp.engine.client_store import Location
from fedexp.engine.plan import Cohort
from fedexp.errors import DivergedError, UsageError, require
from fedexp.local import LocalTraining
from fedexp.objective import ModuleObjective
from fedexp.options import (
    Setup,
    build_algorithm,
    build_task,
    option_text,
    split_algorithm,
    split_task,
    split_task_options,
)
from fedexp.precision import Precision
from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy
from fedexp.references import (
    reference_to,
    refuse_while_importing,
)
from fedexp.runs.checkpoint import (
    client_tensors,
    clients_from,
    from_bytes,
    model_tensors,
    state_from,
    to_bytes,
)
from fedexp.runs.execute import execute, model_bytes, stop_request
from fedexp.runs.files import Row, write_bytes
from fedexp.runs.folder import MODEL
from fedexp.runs.journal import CHECKPOINT_EVERY, RunInterrupted
from fedexp.runs.loggers import Logger
from fedexp.runs.pool import run_all
from fedexp.runs.spec import (
    Outcome,
    Run,
    Spec,
    checked_target,
    file_name,
    read_spec,
    spec_from,
)
from fedexp.tasks.task import Task, Weighting

if TYPE_CHECKING:
    import pandas

    from fedexp.tuning.search import Study as Search
    from fedexp.tuning.store import Trial

CPU = torch.device("cpu")
PathLike = str | os.PathLike[str]
OnRow = Callable[[Spec, Row], None]


class Settings(TypedDict, total=False):
    """Options that `run`, `compare` and `tune` share; None is the task's own everywhere.

    Attributes:
        rounds: number of rounds.
        cohort: clients per round: a number, a fraction, "all", a list of clients, or a function
            (rng, round, federation) that returns them.
        local: local training, instead of the task's.
        weighting: "uniform", or "size" to weigh clients by their examples.
        options: single options by name, as `--set` takes them: {"eps": 0.01, "local.lr": 0.1}.
        mode: "paper" or "authors-code".
        evaluate_every: rounds between evaluations.
        engine: see `simulate`.
        device: e.g. "cuda".
        precision: "float32", "tf32" or "bf16".
        stop_at: value of the task's metric at which a run ends early.
        deterministic: use deterministic torch operations only.
        start: weights that training begins with: a record, a module, a state_dict, a run folder or
            a safetensors file.
        privacy: simulated differential privacy, see docs/privacy.md.
        by_client: also evaluate every client, for the worst decile.
    """

    rounds: int | None
    cohort: Cohort | None
    local: LocalTraining | None
    weighting: Weighting | None
    options: Mapping[str, Any] | None
    mode: str
    evaluate_every: int | None
    engine: EngineName
    device: str | None
    precision: Precision | None
    stop_at: float | None
    deterministic: bool
    start: Record | nn.Module | Mapping[str, Tensor] | PathLike | None
    privacy: CentralPrivacy | LocalPrivacy | None
    by_client: bool


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
            weights = _weights(self.folder)
        return _module_with(weights, _module_of(self.run.task, self.run.spec.seed))

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
    prepared = _spec(task, algorithm, seed, settings, runs).prepare()
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
    """

    runs: list[Run]
    outcomes: list[Outcome]
    target: float | None
    smooth: int = 1

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
        higher = self._first.task.goal.higher
        return summarise(self.outcomes, self.metric, self.target, self.smooth, higher)

    def table(self, format: str = "text") -> str:
        """Return the table of the comparison: "text", "markdown", "csv" or "latex"."""
        rounds, higher = self._first.rounds, self._first.task.goal.higher
        cells = comparison_table(self.lines, self.metric, self.target, rounds, self.smooth, higher)
        return render_table(format, *(comparison_numbers(self.lines) if format == "csv" else cells))

    def frame(self) -> pandas.DataFrame | list[Row]:
        """Return the rows of all runs, with their algorithm and seed; see `RunResult.frame`."""
        named = [(o, {"algorithm": o.spec.algorithm, "seed": o.spec.seed}) for o in self.outcomes]
        return _frame([{**names, **row} for outcome, names in named for row in outcome.rows])

    def plot(self, path: PathLike) -> Path:
        """Draw the metric, the training loss and the server step size into a file."""
        picture = Path(path)
        check_writable(picture)
        title = f"{self._first.spec.task}: {self._first.rounds} rounds, {self._seeds()}"
        figure = comparison_figure(self.outcomes, self.metric, self.target, title, self.smooth)
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
        targets = Targets(self.target)
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
    target: float | None = None,
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
        target: value of the task's metric that counts as reached; the task's own when None.
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
    chosen = list(algorithms)
    require(bool(chosen), "compare needs at least one algorithm, e.g. ['fedavg', 'fedexp']")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    require(bool(numbers), "compare needs at least one seed")
    firsts = _prepared(task, chosen, numbers[0], settings, runs)
    wanted = checked_target(target, firsts[0].task.metric, "target")
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
            )
        except RunInterrupted:
            raise KeyboardInterrupt("stopped; the same call continues") from None
    return Comparison(firsts, outcomes, firsts[0].task.target if wanted is None else wanted, smooth)


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
        grid: values by option, e.g. {"eps": [1e-3, 1e-2], "local.lr": [0.1, 1.0]}; the paper's
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
    own: Settings = {**settings, "rounds": settings.get("rounds") or ROUNDS}
    prepared = _spec(task, algorithm, seed, own).prepare()
    _, fixed = split_task_options(dict(prepared.spec.options))
    if grid is not None:
        values = check_none_fixed(checked_grid(grid, prepared.setup), dict(fixed))
    else:
        ranges = free_ranges if protocol == "free" else paper_grid
        values = without_fixed(ranges(prepared.setup, prepared.task.sums), fixed)
    path = Path(f"tune-{file_name(prepared.spec.task)}.db" if store is None else store)
    study = Study(prepared, protocol, values, path, trials)
    check_study(study)
    with stop_request() as request:
        runner = TrialRunner(jobs, ranks(), lambda left: nullcontext(on_round), stop=request)
        try:
            return Tuning(study, search(study, runner))
        except RunInterrupted:
            raise KeyboardInterrupt("stopped; the same call continues") from None


def load_model(
    folder: PathLike, model: Callable[[], nn.Module] | nn.Module | None = None
) -> nn.Module:
    """Return the trained model of a finished run, on the CPU.

    Args:
        folder: the run folder.
        model: the class, a function or a module to load the weights into. When None the task of the
            run is built again, which imports the file that defines it.
    """
    path = Path(folder)
    weights = _weights(path)
    if model is None:
        spec = spec_from(read_spec(path))
        of_task, _ = split_task_options(dict(spec.options))
        try:
            task = build_task(spec.task, of_task, spec.seed, spec.mode, spec.task_source)
        except UsageError as error:
            raise UsageError(f"{error}; or pass the model: load_model(folder, model=Net)") from None
        return _module_with(weights, _module_of(task, spec.seed))
    return _module_with(weights, deepcopy(model) if isinstance(model, nn.Module) else model())


def save_state(state: SimulationState, path: PathLike) -> None:
    """Write a state to a safetensors file, from which `load_state` continues.

    It holds everything: model, server state and client state.
    """
    clients = client_tensors(state, state.clients)
    counts = {"round": torch.tensor(state.round), "steps": torch.tensor(state.steps)}
    named = {f"model/{name}": value for name, value in {**counts, **model_tensors(state)}.items()}
    named |= {f"client/{name}": value for name, value in clients.items()}
    write_bytes(Path(path), to_bytes(named))


def load_state(path: PathLike, device: str | torch.device = "cpu") -> SimulationState:
    """Return a state that `save_state` wrote; pass it to `simulate(start=...)`."""
    try:
        found = from_bytes(Path(path).read_bytes(), torch.device(device))
        named = {n.removeprefix("model/"): v for n, v in found.items() if n.startswith("model/")}
        own = {n.removeprefix("client/"): v for n, v in found.items() if n.startswith("client/")}
        numbers = sorted({int(name.partition("/")[0]) for name in own})
        counts = int(named.pop("round")), int(named.pop("steps"))
        return state_from(*counts, named, clients_from(own, numbers))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError):
        raise UsageError(f"{path} is not a state; write it with fedexp.save_state") from None


def _prepared(
    task: Task | str,
    algorithms: Sequence[Algorithm | str],
    seed: int,
    settings: Settings,
    runs: PathLike | None,
) -> list[Run]:
    """Return a run of each algorithm over one task; `name:key` options are for one algorithm."""
    options = dict(settings.get("options") or {})
    general = {key: value for key, value in options.items() if ":" not in key}
    firsts: list[Run] = []
    for algorithm in algorithms:
        bare = _spec(task, algorithm, seed, {**settings, "options": {}}, runs)
        built = firsts[0].task if firsts else None
        setup = bare.prepare(built).setup
        own = {k: v for k, v in general.items() if k.startswith("task.") or setup.has_option(k)}
        prefix = f"{bare.algorithm}:"
        own |= {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
        firsts.append(_with_options(bare, own).prepare(None if _of_task(own) else built))
    names = [first.spec.algorithm for first in firsts]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(
        twice is None,
        f"two algorithms are called {twice!r}; give one another name, e.g. "
        'dataclasses.replace(algorithm, name="...")',
    )
    known = {key for first in firsts for key in general if first.setup.has_option(key)}
    for key in general:
        if key not in known and not key.startswith("task."):
            firsts[0].setup.full_name(key)  # raises, naming the nearest option
    for key in options.keys() - general.keys():
        name = key.partition(":")[0]
        require(name in names, f"options has {key!r}, but no algorithm is called {name!r}")
    return firsts


def _spec(
    task: Task | str,
    algorithm: Algorithm | str,
    seed: int,
    settings: Settings,
    runs: PathLike | None = None,
) -> Spec:
    """Return the spec of a run of these objects."""
    if isinstance(task, str):
        task_name, task_source = split_task(task)
    else:
        require(
            isinstance(task, Task),
            f"the task is {type(task).__name__}, not a Task; make one with fedexp.supervised, or "
            'give the name of one, e.g. "digits"',
        )
        task_name, task_source = task.name, reference_to(task, task.name)
    name, source = _named_algorithm(algorithm)
    start = settings.get("start")
    bare = Spec(
        task=task_name,
        algorithm=name,
        seed=_whole(seed, "seed"),
        rounds=_whole(settings.get("rounds"), "rounds"),
        cohort=_cohort(settings.get("cohort")),
        mode=settings.get("mode", "paper"),
        evaluate_every=_whole(settings.get("evaluate_every"), "evaluate_every"),
        engine=settings.get("engine", "auto"),
        device=settings.get("device"),
        precision=settings.get("precision"),
        stop_at=settings.get("stop_at"),
        deterministic=settings.get("deterministic", False),
        task_source=task_source,
        algorithm_source=source,
        start=None if start is None else _stored_start(start, runs),
        privacy=settings.get("privacy"),
        by_client=settings.get("by_client", False),
    )
    local, weighting = settings.get("local"), settings.get("weighting")
    given = dict(settings.get("options") or {})
    if isinstance(algorithm, Algorithm) or local is not None or weighting is not None:
        built = _with_options(bare, _of_task(given)).prepare()
        named = built.setup
        wanted = Setup(
            algorithm if isinstance(algorithm, Algorithm) else named.algorithm,
            local or (built.task.local if isinstance(algorithm, Algorithm) else named.local),
            weighting or ("uniform" if isinstance(algorithm, Algorithm) else named.weighting),
        ).options()
        before = named.options()
        given = {**{k: v for k, v in wanted.items() if before.get(k) != v}, **given}
    return _with_options(bare, given)


def _whole(value: Any, name: str) -> Any:
    """Return a whole number of numpy as one of Python, and anything else as it is."""
    if value is not None:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        require(whole, f"{name} must be a whole number: {value!r}")
    return None if value is None else int(value)


def _cohort(cohort: Any) -> int | float | tuple[int, ...] | str | None:
    """Return a cohort as a spec has it: a function by its reference."""
    if cohort is None or isinstance(cohort, str):
        return cohort
    if callable(cohort):
        return reference_to(cohort, getattr(cohort, "__name__", "choose"))
    if isinstance(cohort, Integral):
        require(int(cohort) >= 1, f"the cohort must be at least 1, not {cohort}")
        return int(cohort)
    return float(cohort) if isinstance(cohort, Real) else tuple(map(int, cohort))


def _stored_start(start: Any, runs: PathLike | None) -> str:
    """Return the file of weights to start from; those in memory are written beside the runs.

    So that another process can resume the run.
    """
    if isinstance(start, str | os.PathLike):
        return str(start)
    weights = start.model() if isinstance(start, Record) else start
    if isinstance(weights, nn.Module):
        weights = weights.state_dict()
    require(
        isinstance(weights, Mapping),
        "start is a record, a module, a state_dict, a run folder or a safetensors file, not "
        f"{type(start).__name__}; to continue a run, call run again",
    )
    data = to_bytes(weights)
    folder = Path(tempfile.gettempdir() if runs is None else runs) / "starts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    if not path.exists():
        write_bytes(path, data)
    return str(path)


def _with_options(spec: Spec, options: Mapping[str, Any]) -> Spec:
    texts = {name: option_text(value) for name, value in options.items()}
    return replace(spec, options=tuple({**dict(spec.options), **texts}.items()))


def _of_task(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("task.")}


def _is_registered(algorithm: Algorithm) -> bool:
    """Return whether an algorithm is one of the package, perhaps with other values."""
    if algorithm.name not in ALGORITHMS:
        return False
    own = build_algorithm(algorithm.name)
    return type(own.client) is type(algorithm.client) and type(own.server) is type(algorithm.server)


def _named_algorithm(algorithm: Algorithm | str) -> tuple[str, str | None]:
    """Return the name of an algorithm, and its reference if it is the user's own."""
    if isinstance(algorithm, str):
        return split_algorithm(algorithm)
    require(
        isinstance(algorithm, Algorithm),
        f"the algorithm is {algorithm!r}, not an Algorithm; call it, e.g. fedexp.fedavg(), or give "
        'its name, e.g. "fedavg"',
    )
    source = None if _is_registered(algorithm) else reference_to(algorithm, algorithm.name)
    return algorithm.name, source


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a finished run by name."""
    try:
        return from_bytes((folder / MODEL).read_bytes(), CPU)
    except FileNotFoundError:
        read_spec(folder)  # raises where there is no run
        raise UsageError(
            f"{folder} has no model yet: the run is not finished; continue it with: "
            f"fedexp resume {folder}"
        ) from None
    except (OSError, ValueError):
        raise UsageError(f"{folder / MODEL} cannot be read; run it again with --restart") from None


def _module_of(task: Task, seed: int) -> nn.Module:
    require(
        isinstance(task.objective, ModuleObjective),
        f"task {task.name} has no nn.Module; its weights are one vector, in model.safetensors",
    )
    assert isinstance(task.objective, ModuleObjective)
    return deepcopy(task.objective.initial_module(seed))


def _module_with(weights: Mapping[str, Tensor], module: nn.Module) -> nn.Module:
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError as error:
        lines = str(error).splitlines()
        reason = (lines[1:] or lines)[0].strip()
        raise UsageError(f"the weights do not fit {type(module).__name__}: {reason}") from None
    return module.eval()


def _frame(rows: Sequence[Row]) -> pandas.DataFrame | list[Row]:
    try:
        import pandas
    except ImportError:
        return list(rows)
    return pandas.DataFrame(rows)
