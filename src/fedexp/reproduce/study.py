"""A study of the paper: the runs it needs, and the findings its runs lead to.

A `Study` describes one table or figure of the paper. `make_plan` turns it and the user's `Request`
into a `Plan`: the list of runs (`Job`), and every way in which they differ from the paper's. The
runs' `Result`s go to `Study.measure`, which returns `Findings`: a table, checks of the paper's
claims, and a figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedexp.analysis.tables import count
from fedexp.data.datasets import DATASETS
from fedexp.data.sources.download import data_folder
from fedexp.errors import UsageError, check_name
from fedexp.experiment import Experiment
from fedexp.precision import Precision, default_precision
from fedexp.reproduce.published import Claim, Table, claim
from fedexp.runs.spec import Outcome
from fedexp.tasks import images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL_WRITERS = 3400  # clients of federated EMNIST


@dataclass(frozen=True)
class Arm:
    """One curve of a study: an algorithm with the options that set it apart.

    Attributes:
        series: its name in tables and figures.
        algorithm: the algorithm.
        options: what differs from the task's own values.
        mode: the only mode in which it is run; None for all.
    """

    series: str
    algorithm: str
    options: tuple[tuple[str, str], ...] = ()
    mode: str | None = None


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper.

    Attributes:
        name: its name on the command line.
        title: the table or figure and what it shows.
        needs: hardware or time for the full study, in words.
        rounds: the paper's number of rounds.
        seeds: the paper's number of seeds, by task; the keys are the study's tasks, in order.
        arms: returns the curves on a task.
        measure: returns the findings from the plan and its results.
        evaluate_every: rounds between evaluations.
        small_rounds: rounds at `--scale small`.
        least_arms: of a task; with fewer, or all where it has fewer, stored runs do not make it.
        remarks: what the paper leaves open, and what is done here.
    """

    name: str
    title: str
    needs: str
    rounds: int
    seeds: Mapping[str, int]
    arms: Callable[[str], Sequence[Arm]]
    measure: Callable[[Plan, Sequence[Result]], Findings]
    evaluate_every: int = 5
    small_rounds: int = 20
    least_arms: int = 1
    remarks: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of its tasks."""
        return tuple(self.seeds)

    def runs(self) -> int:
        """Return the number of runs of the full study."""
        return sum(len(self.arms(task)) * seeds for task, seeds in self.seeds.items())

    def cost(self) -> str:
        """Return what the full study takes, in a few words."""
        runs = self.runs()
        return f"{runs} runs of {self.rounds:,} rounds; {self.needs}" if runs else self.needs


@dataclass(frozen=True)
class Request:
    """What the user requests; None takes the study's own value.

    Attributes:
        rounds: rounds of every run.
        seeds: number of seeds, 0 to seeds - 1.
        tasks: some of the study's tasks; empty for all whose data are available.
        small: whether to shrink data, model and rounds to minutes on a CPU.
        mode: "paper" or "authors-code".
        device: e.g. "cuda"; None for the CPU.
        precision: arithmetic inside the model.
    """

    rounds: int | None = None
    seeds: int | None = None
    tasks: tuple[str, ...] = ()
    small: bool = False
    mode: str = "paper"
    device: str | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class Job:
    """A run of a study: the paper's task, the arm's series, and the experiment."""

    task: str
    series: str
    experiment: Experiment


@dataclass(frozen=True)
class Result:
    """A job with its outcome."""

    job: Job
    outcome: Outcome


@dataclass(frozen=True)
class Plan:
    """The runs that a request leads to.

    Attributes:
        study: the study.
        request: what the user requested.
        tasks: the tasks to run.
        rounds: rounds of every run.
        jobs: the runs, in order.
        shrunk: one line for each way in which the study is smaller than the paper's, or longer.
        left_out: one line for each task that is not run, with the remedy.
        comparable: whether differences from the published values are meaningful.
        partial: tasks whose differences are not meaningful, because their data are incomplete.
    """

    study: Study
    request: Request
    tasks: tuple[str, ...]
    rounds: int
    jobs: tuple[Job, ...] = ()
    shrunk: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    comparable: bool = True
    partial: tuple[str, ...] = ()

    def arms(self, task: str) -> list[Arm]:
        """Return the curves on a task in the mode of the request."""
        modes = (None, self.request.mode)
        return [arm for arm in self.study.arms(task) if arm.mode in modes]

    @property
    def devices(self) -> str:
        """The devices of the runs, joined by "and"."""
        names = dict.fromkeys(job.experiment.device or "cpu" for job in self.jobs)
        return " and ".join(names) or "cpu"

    @property
    def arithmetic(self) -> str:
        """The precisions of the runs, joined by "and"."""
        return " and ".join(dict.fromkeys(arithmetic_of(job.experiment) for job in self.jobs))

    @property
    def deviation(self) -> str:
        """Either "shrunk" or "changed" if the plan differs from the paper's study; else empty."""
        if not self.shrunk:
            return ""
        longer = self.rounds > self.study.rounds and len(self.shrunk) == 1
        return "changed" if longer else "shrunk"


@dataclass(frozen=True)
class Check:
    """A claim of the paper judged by its criterion on these runs.

    Attributes:
        claim: the claim with its criterion.
        holds: the verdict; None where the runs cannot decide.
        seen: the numbers that were compared.
        task: the task; empty for a study of one task.
        reading: the reading of eps it is about; empty for the printed one.
        seeds: the number of seeds it was judged over; None for a problem without randomness.
        column: the measured column it is about, where it compares series.
        series: the series that it compares; its subject comes first.
    """

    claim: Claim
    holds: bool | None
    seen: str
    task: str = ""
    seeds: int | None = None
    reading: str = ""
    column: str = ""
    series: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return {True: "yes", False: "no", None: "cannot tell"}[self.holds]

    @property
    def over(self) -> str:
        """`over 5 seeds`, or nothing for a problem without randomness."""
        return "" if self.seeds is None else f" over {count(self.seeds, 'seed')}"

    def line(self) -> str:
        """Return `task, reading: claim: verdict over N seeds (what was seen)`."""
        about = ", ".join(filter(None, (self.task, self.reading)))
        about += ": " if about else ""
        return f"{about}{self.claim.text}: {self.verdict}{self.over} ({self.seen})"


def check(study: str, key: str, holds: bool | None, seen: str, seeds: int | None = None) -> Check:
    """Return the check of a claim of a study of one task."""
    return Check(claim(study, key), None if holds is None else bool(holds), seen, seeds=seeds)


@dataclass(frozen=True)
class Findings:
    """The table of a study, checks of the paper's claims, and a function that draws the figure."""

    table: Table
    checks: tuple[Check, ...]
    draw: Callable[[], Figure]


def make_plan(study: Study, request: Request) -> Plan:
    """Return the runs of a study. Raises `UsageError` before anything is run if one cannot be."""
    tasks, left_out = choose_tasks(study, request.tasks)
    plan = Plan(study, request, tasks, rounds_of(study, request), left_out=left_out)
    jobs = [job for task in tasks for job in jobs_of(plan, task)]
    return with_jobs(plan, jobs, _check_jobs(jobs))


def with_jobs(plan: Plan, jobs: Sequence[Job], writers: Collection[int]) -> Plan:
    """Return a plan with its runs, and how they are fewer or smaller than the paper's, or longer.

    Args:
        plan: the study, its tasks and rounds.
        jobs: the runs.
        writers: how many EMNIST has, where it is one of the tasks.
    """
    study, request, lines = plan.study, plan.request, list[str]()
    if plan.rounds != study.rounds:
        lines.append(f"{count(plan.rounds, 'round')} instead of {study.rounds:,}")
    for task in plan.tasks:
        seeds = Counter(job.series for job in jobs if job.task == task)
        missing = [arm.series for arm in plan.arms(task) if arm.series not in seeds]
        lines += [f"{task}: {', '.join(missing)} not run"] if missing else []
        lines += _fewer_seeds(task, study.seeds[task], seeds)
        lines += [f"{task}: {SMALL[task].description}"] if request.small and task in SMALL else []
    partial = [
        f"EMNIST has {number:,} writers here instead of {ALL_WRITERS:,}"
        for number in sorted({*writers} - {ALL_WRITERS})
    ]
    return replace(
        plan,
        jobs=tuple(jobs),
        shrunk=(*lines, *partial),
        comparable=plan.rounds == study.rounds and not request.small,
        partial=("emnist",) if partial else (),
    )


def _fewer_seeds(task: str, papers: int, ours: Mapping[str, int]) -> list[str]:
    """Return the numbers of seeds, where they are fewer than the paper's or not all equal."""
    numbers = set(ours.values())
    if len(numbers) > 1:
        each = ", ".join(f"{series} {number}" for series, number in ours.items())
        return [f"{task}: seeds {each} instead of {papers}"]
    return [f"{task}: {count(n, 'seed')} instead of {papers}" for n in numbers if n < papers]


def rounds_of(study: Study, request: Request) -> int:
    """Return the rounds of every run."""
    return request.rounds or (study.small_rounds if request.small else study.rounds)


def choose_tasks(study: Study, wanted: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tasks to run, and one line for each that is left out for lack of data."""
    errors = {name: _missing_data(name) for name in checked_tasks(study, wanted)}
    absent = {name: error for name, error in errors.items() if error is not None}
    for error in absent.values():
        if wanted or len(absent) == len(errors):
            raise error
    present = tuple(name for name in errors if name not in absent)
    return present, tuple(f"{name} is left out: {error}" for name, error in absent.items())


def checked_tasks(study: Study, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the wanted tasks, or all; raise `UsageError` for one that the study does not have."""
    for name in wanted:
        check_name(f"task of {study.name}", name, study.tasks)
    return tuple(wanted) or study.tasks


def jobs_of(plan: Plan, task: str) -> list[Job]:
    """Return every arm with every seed, on one task."""
    request = plan.request
    seeds = request.seeds or (1 if request.small else plan.study.seeds[task])
    return [
        Job(task, arm.series, experiment_of(plan, task, arm).replace(seed=seed))
        for arm in plan.arms(task)
        for seed in range(seeds)
    ]


def experiment_of(plan: Plan, task: str, arm: Arm) -> Experiment:
    """Return the experiment of an arm with seed 0."""
    request, every = plan.request, plan.study.evaluate_every
    if every >= plan.study.rounds:
        every = plan.rounds  # only the end counts
    elif plan.request.small and every > 1:
        every = max(1, plan.rounds // 5)
    small = SMALL.get(task) if request.small else None
    return Experiment(
        task if small is None else small.task,
        arm.algorithm,
        rounds=plan.rounds,
        cohort=None if small is None else small.cohort,
        mode=request.mode,
        options=dict(arm.options),
        evaluate_every=every,
        device=request.device,
        precision=request.precision,
    )


def arithmetic_of(experiment: Experiment) -> str:
    """Return the precision of a run: as requested, or the default of its device."""
    there = torch.device(experiment.device or "cpu")
    usual = "the type of the weights" if there.type == "cpu" else default_precision(there)
    return experiment.precision or usual


def _missing_data(task: str) -> UsageError | None:
    """Return the error that names how to get a task's data, or None where they are available."""
    name = task.removesuffix("-cnn")
    if name not in DATASETS:  # it generates its data
        return None
    dataset, folder = DATASETS[name], data_folder()
    return None if dataset.present(folder) else dataset.source.missing(folder)


def _check_jobs(jobs: Sequence[Job]) -> set[int]:
    """Check one run of each arm without running it; return the writers of EMNIST."""
    last, writers = None, set()
    for job in jobs:
        if job.experiment.seed == 0:
            last = job.experiment.sharing(last)
            last.records()  # checks its arguments; runs nothing
            writers |= {last.problem.train.clients} if last.task == "emnist" else set()
    return writers


@dataclass(frozen=True)
class Small:
    """The task that replaces one of the paper's at `--scale small`.

    Attributes:
        task: its name.
        description: how it differs from the paper's.
        cohort: "all", or None for the task's own number of clients per round.
    """

    task: str
    description: str
    cohort: str | None = None


_LOCAL = f"{images.SMALL_STEPS} local steps of batches of {images.SMALL_BATCH}"
_IMAGES = f"{images.SMALL_TRAIN_IMAGES:,} training and {images.SMALL_TEST_IMAGES:,} test images"
_CNN = (
    f"a small CNN instead of ResNet-18, {_IMAGES}, "
    f"{images.SMALL_COHORT} of {images.SMALL_CLIENTS} clients per round, {_LOCAL}"
)
SMALL = {
    "emnist": Small(
        "emnist-small",
        f"{images.SMALL_WRITERS} writers, {images.SMALL_TEST_IMAGES:,} test images, "
        f"{images.SMALL_COHORT} clients per round, {_LOCAL}",
    ),
    "cifar10": Small("cifar10-small", _CNN),
    "cifar100": Small("cifar100-small", _CNN),
    "cinic10": Small("cinic10-small", _CNN),
    "cifar10-cnn": Small("cifar10-small", f"{_IMAGES}, {_LOCAL}", cohort="all"),
}
