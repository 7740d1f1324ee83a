"""What stands in for the paper's tasks at `--scale small`: a CPU does it in minutes.

`Study`: a table or figure of the paper as runs to make and numbers to hold against it.

From a request to runs: which tasks, how many rounds and seeds, and what that leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fedexp.data.datasets import DATASETS
from fedexp.data.sources.download import cache_path, data_folder
from fedexp.errors import UsageError, unknown_name
from fedexp.precision import Precision, default_precision
from fedexp.reproduce.published import Claim, Table
from fedexp.runs.spec import Outcome, Spec
from fedexp.tasks.small import BATCH, CLIENTS, COHORT, STEPS, TEST_IMAGES, TRAIN_IMAGES, WRITERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Small:
    """The task that is run instead, and what is smaller about it.

    Attributes:
        task: its name.
        meaning: how it differs from the paper's.
        cohort: clients a round, 0 for all; None for the task's own number.
    """

    task: str
    meaning: str
    cohort: int | None = None


_LOCAL = f"{STEPS} local steps of batches of {BATCH}"
_IMAGES = f"{TRAIN_IMAGES:,} training and {TEST_IMAGES:,} test images"
_CNN = (
    f"a small CNN instead of ResNet-18, {_IMAGES}, {COHORT} of {CLIENTS} clients a round, {_LOCAL}"
)

SMALL = {
    "emnist": Small(
        "emnist-small",
        f"{WRITERS} writers, {TEST_IMAGES:,} test images, {COHORT} clients a round, {_LOCAL}",
    ),
    "cifar10": Small("cifar10-small", _CNN),
    "cifar100": Small("cifar100-small", _CNN),
    "cinic10": Small("cinic10-small", _CNN),
    "cifar10-cnn": Small("cifar10-small", f"{_IMAGES}, {_LOCAL}", cohort=0),
}


@dataclass(frozen=True)
class Request:
    """What the user asks for; None leaves it to the study.

    Attributes:
        rounds: rounds of every run.
        seeds: seeds 0 to seeds - 1.
        tasks: some of the study's tasks; empty for all whose data are here.
        small: whether to shrink data, model and rounds to what a CPU does in minutes.
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
class Arm:
    """One curve of a study: an algorithm with the options that set it apart."""

    series: str
    algorithm: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """A run of a study: the paper's task, the arm's series, and the spec that is run."""

    task: str
    series: str
    spec: Spec


@dataclass(frozen=True)
class Result:
    """A job that was run."""

    job: Job
    outcome: Outcome


@dataclass(frozen=True)
class Plan:
    """A request made concrete.

    Attributes:
        study: the study.
        request: what was asked for.
        tasks: the tasks that are run.
        rounds: rounds of every run.
        jobs: the runs, in order.
        shrunk: a line for each way in which the study is smaller than the paper's, or longer.
        left_out: a line for each task that is not run, with the remedy.
        comparable: whether differences from the published figures mean anything.
        partial: tasks whose differences mean nothing, because their data are not all there.
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

    @property
    def devices(self) -> str:
        """Where the runs are made."""
        return " and ".join(dict.fromkeys(job.spec.device or "cpu" for job in self.jobs)) or "cpu"

    @property
    def arithmetic(self) -> str:
        """The precision of the runs; where there are several, all of them."""
        return " and ".join(dict.fromkeys(arithmetic_of(job.spec) for job in self.jobs))

    @property
    def word(self) -> str:
        """What became of the paper's study, in a word; nothing where it is the paper's."""
        if not self.shrunk:
            return ""
        longer = self.rounds > self.study.rounds and len(self.shrunk) == 1
        return "changed" if longer else "shrunk"


def arithmetic_of(spec: Spec) -> str:
    """The precision asked for, or what suits the device: on a CPU the type of the weights."""
    there = torch.device(spec.device or "cpu")
    own = "the type of the weights" if there.type == "cpu" else default_precision(there)
    return spec.precision or own


@dataclass(frozen=True)
class Check:
    """A claim of the paper held against what was seen; `holds` is None where it cannot be told."""

    claim: Claim
    holds: bool | None
    seen: str
    task: str = ""

    def line(self) -> str:
        """`task: claim: yes (what was seen)`."""
        word = "cannot tell" if self.holds is None else "yes" if self.holds else "no"
        task = f"{self.task}: " if self.task else ""
        return f"{task}{self.claim.text}: {word} ({self.seen})"


@dataclass(frozen=True)
class Findings:
    """What a study found: a table, checks of what the paper says, and a way to draw it."""

    table: Table
    checks: tuple[Check, ...]
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Study:
    """A study of the paper.

    Attributes:
        name: what the command line calls it.
        title: the table or figure and what it shows.
        needs: what it takes to run it in full, in words.
        rounds: the paper's number of rounds.
        seeds: the paper's number of seeds, by task; these are the study's tasks, in order.
        arms: the curves on a task.
        measure: the findings, from the plan and its results.
        evaluate_every: rounds between evaluations.
        small_rounds: rounds when shrunk.
        whole: whether a task without some of its arms says nothing.
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
    whole: bool = False
    remarks: tuple[str, ...] = field(default=())

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.seeds)

    def runs(self) -> int:
        """How many runs the whole study takes."""
        return sum(len(self.arms(task)) * seeds for task, seeds in self.seeds.items())

    def cost(self) -> str:
        """What it takes, in a few words."""
        runs = self.runs()
        return f"{runs} runs of {self.rounds:,} rounds; {self.needs}" if runs else self.needs


# Which data set a task reads; a task that is not named here makes its own data.
DATA = {
    "emnist": "emnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "cinic10": "cinic10",
    "cifar10-cnn": "cifar10",
}
ALL_WRITERS = 3400  # clients of the whole of federated EMNIST


def make_plan(study: Study, request: Request) -> Plan:
    """The runs of a study. Raises `UsageError` for what cannot be run, before anything is."""
    tasks, left_out = choose_tasks(study, request.tasks)
    rounds = request.rounds or (study.small_rounds if request.small else study.rounds)
    plan = Plan(study, request, tasks, rounds, left_out=left_out)
    jobs = tuple(job for task in tasks for job in jobs_of(plan, task))
    found = _check(jobs)
    shrunk = (*_shrunk(plan), *found)
    comparable = rounds == study.rounds and not request.small
    partial = ("emnist",) if found else ()
    return replace(plan, jobs=jobs, shrunk=shrunk, comparable=comparable, partial=partial)


def choose_tasks(study: Study, wanted: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tasks to run, and a line for each that is left out because its data are not here."""
    for name in wanted:
        if name not in study.tasks:
            raise unknown_name(f"task of {study.name}", name, study.tasks)
    missing = {name: _missing(name) for name in wanted or study.tasks}
    absent = {name: error for name, error in missing.items() if error is not None}
    for error in absent.values():
        if wanted or len(absent) == len(missing):
            raise error
    present = tuple(name for name in missing if name not in absent)
    return present, tuple(f"{name} is left out: {error}" for name, error in absent.items())


def _missing(task: str) -> UsageError | None:
    """The error that says how to get a task's data, or None where they are here."""
    if task not in DATA:
        return None
    dataset, folder = DATASETS[DATA[task]], data_folder()
    archive = folder / dataset.source.archive
    here = dataset.locate(folder) or archive.exists() or cache_path(folder, dataset.name).exists()
    return None if here else dataset.source.missing(folder)


def jobs_of(plan: Plan, task: str) -> list[Job]:
    """Every arm with every seed, on one task."""
    seeds = _seeds(plan, task)
    return [
        Job(task, arm.series, replace(spec_of(plan, task, arm), seed=seed))
        for arm in plan.study.arms(task)
        for seed in range(seeds)
    ]


def _seeds(plan: Plan, task: str) -> int:
    return plan.request.seeds or (1 if plan.request.small else plan.study.seeds[task])


def spec_of(plan: Plan, task: str, arm: Arm) -> Spec:
    """The run of an arm, with seed 0."""
    request, every = plan.request, plan.study.evaluate_every
    if every >= plan.study.rounds:
        every = plan.rounds  # only the end counts
    elif plan.request.small and every > 1:
        every = max(1, plan.rounds // 5)
    spec = Spec(
        task=task,
        algorithm=arm.algorithm,
        rounds=plan.rounds,
        mode=request.mode,
        evaluate_every=every,
        device=request.device,
        precision=request.precision,
        options=arm.options,
    )
    if not request.small or task not in SMALL:
        return spec
    return replace(spec, task=SMALL[task].task, cohort=SMALL[task].cohort)


def _check(jobs: Sequence[Job]) -> tuple[str, ...]:
    """Prepare one run of each arm, over one task; tells of data that are not all there."""
    notes, built = [], {}
    for job in jobs:
        if job.spec.seed != 0:
            continue
        if job.spec.task not in built:
            built[job.spec.task] = job.spec.prepare().task
        job.spec.prepare(built[job.spec.task]).records()  # checks its arguments; runs nothing
    whole = built.get("emnist")
    if whole is not None and whole.train.clients != ALL_WRITERS:
        notes.append(f"EMNIST has {whole.train.clients:,} writers here instead of {ALL_WRITERS:,}")
    return tuple(notes)


def _shrunk(plan: Plan) -> list[str]:
    """How the plan is smaller than the paper's study, or longer; more seeds do no harm."""
    lines, study = [], plan.study
    if plan.rounds != study.rounds:
        lines.append(f"{count(plan.rounds, 'round')} instead of {study.rounds:,}")
    for task in plan.tasks:
        if (seeds := _seeds(plan, task)) < study.seeds[task]:
            lines.append(f"{task}: {count(seeds, 'seed')} instead of {study.seeds[task]}")
        lines += small_line(plan, task)
    return lines


def small_line(plan: Plan, task: str) -> list[str]:
    """What stands in for a task of the paper, where something does."""
    shrunk = plan.request.small and task in SMALL
    return [f"{task}: {SMALL[task].meaning}"] if shrunk else []


def count(number: int, what: str) -> str:
    """`1 seed`, `2,000 rounds`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
