"""From a request to runs: which tasks, how many rounds and seeds, and what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedexp.data.datasets import DATASETS
from fedexp.data.files import cache_path, data_folder
from fedexp.errors import UsageError, unknown_name
from fedexp.experiments.spec import Spec
from fedexp.studies.reproduce.small import SMALL
from fedexp.studies.reproduce.study import Arm, Job, Plan, Request, Study

# Which data set a task reads; a task that is not named here makes its own data.
DATA = {
    "emnist": "emnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "cinic10": "cinic10",
    "cifar10-cnn": "cifar10",
}
WRITERS = 3400  # clients of the whole of federated EMNIST


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
    if whole is not None and whole.train.clients != WRITERS:
        notes.append(f"EMNIST has {whole.train.clients:,} writers here instead of {WRITERS:,}")
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
