"""A study from stored runs: no data, no training.

`plan_from` picks the runs that a study would make, whatever their seed, device and precision, and
lists what is missing. Ambiguous runs, and runs that do not belong together, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fedexp.catalogue import build_algorithm
from fedexp.errors import UsageError, unknown_name
from fedexp.experiment import Experiment
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.reproduce.accuracy_studies import SEEDS
from fedexp.reproduce.study import (
    ALL_WRITERS,
    Job,
    Plan,
    Request,
    Result,
    Study,
    count,
    experiment_of,
    rounds_of,
    small_line,
)
from fedexp.runs import StoredRun
from fedexp.runs.spec import Outcome
from fedexp.tasks.images import COHORT

Found = dict[str, dict[str, list[StoredRun]]]  # by task and series, one per seed


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
    for name in request.tasks:
        if name not in study.tasks:
            raise unknown_name(f"task of {study.name}", name, study.tasks)
    requested = Plan(study, request, request.tasks or study.tasks, rounds_of(study, request))
    finished = [run for run in runs if run.result is not None]
    found = {task: _runs_of(requested, task, finished) for task in requested.tasks}
    reasons = {task: _left_out(requested, task, arms) for task, arms in found.items()}
    used = {task: own for task, own in found.items() if not reasons[task]}
    results = [
        Result(Job(task, series, Experiment.of(run.spec)), run.outcome())
        for task, own in used.items()
        for series, runs in own.items()
        for run in runs
    ]
    partial = _partial(used)
    plan = replace(
        requested,
        tasks=tuple(used),
        jobs=tuple(result.job for result in results),
        shrunk=(*_shrunk(requested, used), *partial),
        left_out=tuple(line for line in reasons.values() if line),
        comparable=requested.rounds == study.rounds and not request.small,
        partial=("emnist",) if partial else (),
    )
    return plan, results


def reusable(plan: Plan, runs: Sequence[StoredRun]) -> dict[Job, Outcome]:
    """Return the outcomes of the plan's jobs that stored runs have, on the same hardware.

    A run whose task had another number of clients than it has here is not used.
    """
    finished = [run for run in runs if run.result is not None]
    found: dict[Job, Outcome] = {}
    for task in plan.tasks:
        jobs = [job for job in plan.jobs if job.task == task]
        own = {job: run for job in jobs if (run := _stored_run(plan, job, finished)) is not None}
        if own:
            clients = jobs[0].experiment.problem.train.clients
            found |= {j: run.outcome() for j, run in own.items() if run.spec["clients"] == clients}
    return found


def _stored_run(plan: Plan, job: Job, runs: Sequence[StoredRun]) -> StoredRun | None:
    """Return the finished run of a job; raises `UsageError` if there are two."""
    wanted = job.experiment
    same = [
        run
        for run in _runs_with(runs, wanted, plan.request)
        if run.spec["seed"] == wanted.seed
        and (run.spec.get("device") or "cpu") == (wanted.device or "cpu")
        and run.spec.get("precision") == wanted.precision
    ]
    _refuse_twins(same)
    return same[0] if same else None


def _runs_of(plan: Plan, task: str, runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of each arm that has some, in the order of their seeds."""
    found = {}
    for arm in plan.arms(task):
        wanted = experiment_of(plan, task, arm)
        own = _runs_with(runs, wanted, plan.request)
        own.sort(key=lambda run: int(run.spec["seed"]))
        _refuse_twins(own)
        if own:
            found[arm.series] = own
    _refuse_mixture([run for own in found.values() for run in own])
    return found


def _runs_with(runs: Sequence[StoredRun], wanted: Experiment, request: Request) -> list[StoredRun]:
    """Return the runs of an arm: those typed with its options, or else those of equal values."""
    fitting = [run for run in runs if _fits(run, wanted, request)]
    return [run for run in fitting if run.spec["set"] == wanted.options] or fitting


def _fits(run: StoredRun, wanted: Experiment, request: Request) -> bool:
    """Compare a run with the wanted one; seeds may differ, and hardware that is left open."""
    spec = run.spec
    return (
        (spec["task"], spec["algorithm"]) == (wanted.task, wanted.algorithm)
        and (spec.get("mode"), spec["rounds"]) == (wanted.mode, wanted.rounds)
        and _has_options(spec, wanted)
        and spec.get("evaluate_every") == wanted.evaluate_every
        and spec.get("stop_at") is None
        and _has_cohort(spec, wanted)
        and request.device in (None, spec.get("device"))
        and request.precision in (None, spec.get("precision"))
    )


def _has_options(spec: Mapping[str, Any], wanted: Experiment) -> bool:
    """Return whether a run has the options of an arm, and all others at the task's own values."""
    setup = Setup(build_algorithm(str(wanted.algorithm)), LocalTraining())
    options: dict[str, Any] = {}
    for name, text in wanted.options.items():
        full = setup.full_name(name)
        options[full] = setup.with_option(name, text).options()[full]
    return set(spec["changed"]) <= options.keys() and all(
        str(spec["options"].get(name)) == ("none" if value is None else str(value))
        for name, value in options.items()
    )


def _has_cohort(spec: Mapping[str, Any], wanted: Experiment) -> bool:
    """Return whether the cohort is the study's, or else that of the paper's task."""
    if wanted.cohort is not None:
        return bool(wanted.cohort == spec.get("cohort", "all"))
    return wanted.task not in SEEDS or spec.get("cohort") == min(COHORT, spec["clients"])


def _refuse_mixture(runs: Sequence[StoredRun]) -> None:
    """Raise `UsageError` unless all runs have the same clients."""
    for first, second in pairwise(runs):
        if first.spec["clients"] != second.spec["clients"]:
            raise UsageError(
                f"{first.folder.name} and {second.folder.name} have different clients; remove "
                "those that do not belong"
            )


def _refuse_twins(runs: Sequence[StoredRun]) -> None:
    """Raise `UsageError` for two runs of one seed, or of different settings."""
    for first, second in pairwise(runs):
        names = f"{first.folder.name} and {second.folder.name}"
        if first.spec["seed"] == second.spec["seed"]:
            raise UsageError(
                f"{names} are the same seed twice; choose with --device or --precision, or "
                "remove one"
            )
        if (name := _differing(first, second)) is not None:
            raise UsageError(f"{names} differ in {name}; remove those that do not belong")


def _differing(first: StoredRun, second: StoredRun) -> str | None:
    """Return a setting in which two runs differ that should differ in their seed alone."""
    for name in ("cohort", "clients"):
        if first.spec.get(name) != second.spec.get(name):
            return name
    one, other = first.spec["options"], second.spec["options"]
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


def _left_out(plan: Plan, task: str, found: Mapping[str, Sequence[StoredRun]]) -> str:
    """Return why a task is left out; empty if it is not."""
    study, arms = plan.study, plan.arms(task)
    if len(found) == len(arms) or (found and not study.needs_all_arms):
        return ""
    if len(found) <= 1:  # a single setting is a run of another study
        return f"{task} is left out: it has not been run"
    return f"{task} is left out: {len(found)} of its {len(arms)} settings have been run"


def _shrunk(plan: Plan, found: Found) -> list[str]:
    """Return how the runs are fewer or smaller than the paper's."""
    lines, study = [], plan.study
    if plan.rounds != study.rounds:
        lines.append(f"{count(plan.rounds, 'round')} instead of {study.rounds:,}")
    for task, own in found.items():
        missing = [arm.series for arm in plan.arms(task) if arm.series not in own]
        lines += [f"{task}: {', '.join(missing)} not run"] if missing else []
        lines += _seeds(task, study.seeds[task], {s: len(runs) for s, runs in own.items()})
        lines += small_line(plan, task)
    return lines


def _seeds(task: str, papers: int, ours: Mapping[str, int]) -> list[str]:
    """Return the numbers of seeds, where they are fewer than the paper's or not all equal."""
    if not ours or (min(ours.values()) >= papers and len(set(ours.values())) == 1):
        return []
    if len(set(ours.values())) == 1:
        return [f"{task}: {count(min(ours.values()), 'seed')} instead of {papers}"]
    each = ", ".join(f"{series} {number}" for series, number in ours.items())
    return [f"{task}: seeds {each} instead of {papers}"]


def _partial(found: Found) -> list[str]:
    """Return a line if EMNIST has only some of its writers."""
    runs = [run for own in found.get("emnist", {}).values() for run in own]
    writers = {int(run.spec["clients"]) for run in runs if run.spec["task"] == "emnist"}
    return [
        f"EMNIST has {number:,} writers here instead of {ALL_WRITERS:,}"
        for number in sorted(writers - {ALL_WRITERS})
    ]
