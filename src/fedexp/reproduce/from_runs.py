"""A study from stored runs.

`plan_from` makes it without data and without training: it picks the runs that the study would make,
whatever their seed, device and precision, and lists what is missing. Ambiguous runs, and runs that
do not belong together, are refused. `reusable` finds stored runs of a plan by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fedexp.catalogue import build_algorithm
from fedexp.errors import UsageError
from fedexp.experiment import Experiment
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.plain import id_of
from fedexp.reproduce.accuracy_studies import TARGETED
from fedexp.reproduce.study import (
    Arm,
    Job,
    Plan,
    Request,
    Result,
    Study,
    checked_tasks,
    experiment_of,
    rounds_of,
    with_jobs,
)
from fedexp.runs import StoredRun
from fedexp.runs.spec import Outcome, differing, without_id
from fedexp.tasks.images import COHORT


def plan_from(
    study: Study, request: Request, runs: Sequence[StoredRun]
) -> tuple[Plan, list[Result]]:
    """Return the plan and the results that stored runs make of a study.

    Seeds and arms are those of the runs. A plan without tasks found none.

    Args:
        study: the study.
        request: rounds, tasks and scale.
        runs: candidates; those of other studies are ignored.
    """
    plan = Plan(study, request, checked_tasks(study, request.tasks), rounds_of(study, request))
    finished = [run for run in runs if run.result is not None]
    stored = {task: _runs_of(plan, task, finished) for task in plan.tasks}
    least = {task: min(study.least_arms, len(plan.arms(task))) for task in stored}
    used = {task: arms for task, arms in stored.items() if len(arms) >= least[task]}
    results = [
        Result(Job(task, series, Experiment.of(run.spec)), run.outcome())
        for task, arms in used.items()
        for series, runs in arms.items()
        for run in runs
    ]
    emnist = [result.outcome.spec for result in results if result.outcome.spec["task"] == "emnist"]
    left_out = tuple(
        f"{task} is left out: it has not been run"
        if len(arms) <= 1  # a single setting is a run of another study
        else f"{task} is left out: {len(arms)} of its {len(plan.arms(task))} settings have been run"
        for task, arms in stored.items()
        if task not in used
    )
    plan = replace(plan, tasks=tuple(used), left_out=left_out)
    jobs = [result.job for result in results]
    return with_jobs(plan, jobs, {int(spec["clients"]) for spec in emnist}), results


def reusable(plan: Plan, runs: Sequence[StoredRun]) -> dict[Job, Outcome]:
    """Return the outcomes of the plan's jobs that are over among stored runs: those of equal id."""
    stored = {id_of(without_id(run.spec)): run for run in runs if run.result is not None}
    reused, last = {}, None
    for job in sorted(plan.jobs, key=lambda job: (job.task, job.experiment.seed)):
        last = job.experiment.replace().sharing(last)  # a copy, so that its task is dropped with it
        if (run := stored.get(last.id)) is not None:
            reused[job] = run.outcome()
    return reused


def _runs_of(plan: Plan, task: str, runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of each arm that has some, in the order of their seeds."""
    stored = {}
    for arm in plan.arms(task):
        fitting = [run for run in runs if _fits(run.spec, plan, task, arm)]
        # those typed with the options of the arm, or else those of equal values
        typed = [run for run in fitting if run.spec["set"] == dict(arm.options)] or fitting
        typed.sort(key=lambda run: int(run.spec["seed"]))
        for first, second in pairwise(typed):
            _refuse_twins(first, second)
        if typed:
            stored[arm.series] = typed
    for first, second in pairwise(run for series in stored.values() for run in series):
        if first.spec["clients"] != second.spec["clients"]:
            raise UsageError(
                f"{first.folder.name} and {second.folder.name} have different clients; remove "
                "those that do not belong"
            )
    return stored


def _fits(spec: Mapping[str, Any], plan: Plan, task: str, arm: Arm) -> bool:
    """Compare a run with an arm; seeds may differ, and hardware that is left open.

    It has the options of the arm and all others at the task's own values. Its cohort is the
    study's, or else that of the paper's task.
    """
    wanted = experiment_of(plan, task, arm)
    for name in ("task", "algorithm", "mode", "rounds", "evaluate_every", "stop_at"):
        if spec.get(name) != getattr(wanted, name):
            return False
    for name in ("device", "precision"):
        if getattr(wanted, name) not in (None, spec.get(name)):
            return False
    setup = Setup(build_algorithm(arm.algorithm), LocalTraining())
    options = dict(setup.parse(name, text) for name, text in arm.options)
    cohort = wanted.cohort
    if cohort is None and wanted.task in TARGETED:
        cohort = min(COHORT, spec["clients"])
    return (
        cohort in (None, spec.get("cohort", "all"))
        and set(spec["changed"]) <= options.keys()
        and all(
            str(spec["options"].get(name)) == ("none" if value is None else str(value))
            for name, value in options.items()
        )
    )


def _refuse_twins(first: StoredRun, second: StoredRun) -> None:
    """Raise `UsageError` for two runs of one seed, or of different settings."""
    names = f"{first.folder.name} and {second.folder.name}"
    if first.spec["seed"] == second.spec["seed"]:
        raise UsageError(
            f"{names} are the same seed twice; choose with --device or --precision, or remove one"
        )
    one, two = (
        {name: run.spec.get(name) for name in ("cohort", "clients")} | run.spec["options"]
        for run in (first, second)
    )
    if (name := differing(one, two)) is not None:
        raise UsageError(f"{names} differ in {name}; remove those that do not belong")
