"""A study from stored runs: no data, no training.

`plan_from` picks the runs that a study would make, whatever their seed, device and precision, and
lists what is missing. Ambiguous runs, and runs that do not belong together, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError, unknown_name
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
    rounds_of,
    small_line,
    spec_of,
)
from fedexp.runs import StoredRun, spec_from
from fedexp.runs.spec import Outcome, Spec
from fedexp.tasks.images import COHORT

Found = dict[str, dict[str, list[StoredRun]]]  # by task and series, one per seed
SUPERSEDED = "run with the earlier start of v; to be run again"


def is_superseded(run: StoredRun) -> bool:
    """Return whether an adaptive server rule of the run started v at tau squared by default.

    Runs of that version recorded the option `server.form` as "reddi"; later ones never do.
    """
    return bool(run.spec.get("options", {}).get("server.form") == "reddi")


def plan_from(
    study: Study,
    request: Request,
    runs: Sequence[StoredRun],
    *,
    count_superseded: bool = False,
) -> tuple[Plan, list[Result]]:
    """Return the plan and the results that stored runs make of a study.

    Seeds and arms are those of the runs. A plan without tasks found none.

    Args:
        study: the study.
        request: rounds, tasks and scale.
        runs: candidates; those of other studies are ignored.
        count_superseded: whether to use superseded runs; otherwise they are listed as missing.
    """
    for name in request.tasks:
        if name not in study.tasks:
            raise unknown_name(f"task of {study.name}", name, study.tasks)
    requested = Plan(study, request, request.tasks or study.tasks, rounds_of(study, request))
    finished = [run for run in runs if run.result is not None]
    current = [run for run in finished if count_superseded or not is_superseded(run)]
    old = [run for run in finished if is_superseded(run)]
    found = {task: _runs_of(requested, task, current) for task in requested.tasks}
    superseded = {task: _series_of(requested, task, old) for task in requested.tasks}
    reasons = {
        task: _left_out(requested, task, own, superseded[task]) for task, own in found.items()
    }
    used = {task: own for task, own in found.items() if not reasons[task]}
    results = [
        Result(Job(task, series, spec_from(run.spec)), run.outcome())
        for task, own in used.items()
        for series, runs in own.items()
        for run in runs
    ]
    partial = _partial(used)
    plan = replace(
        requested,
        tasks=tuple(used),
        jobs=tuple(result.job for result in results),
        shrunk=(*_shrunk(requested, used, superseded), *partial),
        left_out=tuple(line for line in reasons.values() if line),
        comparable=requested.rounds == study.rounds and not request.small,
        partial=("emnist",) if partial else (),
    )
    return plan, results


def reusable(plan: Plan, runs: Sequence[StoredRun]) -> dict[Job, Outcome]:
    """Return the outcomes of the plan's jobs that stored runs have, on the same hardware.

    A run whose task had another number of clients than it has here is not used.
    """
    finished = [run for run in runs if run.result is not None and not is_superseded(run)]
    found: dict[Job, Outcome] = {}
    for task in plan.tasks:
        jobs = [job for job in plan.jobs if job.task == task]
        own = {job: run for job in jobs if (run := _stored_run(plan, job, finished)) is not None}
        if own:
            clients = jobs[0].spec.prepare().task.train.clients
            found |= {j: run.outcome() for j, run in own.items() if run.spec["clients"] == clients}
    return found


def _stored_run(plan: Plan, job: Job, runs: Sequence[StoredRun]) -> StoredRun | None:
    """Return the finished run of a job; raises `UsageError` if there are two."""
    spec = job.spec
    same = [
        run
        for run in runs
        if _fits(run, spec, plan.request)
        and run.spec["seed"] == spec.seed
        and (run.spec.get("device") or "cpu") == (spec.device or "cpu")
        and run.spec.get("precision") == spec.precision
    ]
    _refuse_twins(same)
    return same[0] if same else None


def _runs_of(plan: Plan, task: str, runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of each arm that has some, in the order of their seeds."""
    found = {}
    for arm in plan.arms(task):
        wanted = spec_of(plan, task, arm)
        own = [run for run in runs if _fits(run, wanted, plan.request)]
        own.sort(key=lambda run: int(run.spec["seed"]))
        _refuse_twins(own)
        if own:
            found[arm.series] = own
    _refuse_mixture([run for own in found.values() for run in own])
    return found


def _series_of(plan: Plan, task: str, runs: Sequence[StoredRun]) -> list[str]:
    """Return the arms that some of the runs belong to."""
    return [
        arm.series
        for arm in plan.arms(task)
        if any(_fits(run, spec_of(plan, task, arm), plan.request) for run in runs)
    ]


def _fits(run: StoredRun, wanted: Spec, request: Request) -> bool:
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


def _has_options(spec: Mapping[str, Any], wanted: Spec) -> bool:
    """Return whether a run has the options of an arm, and all others at the task's own values.

    Specs of format 1 have options as they were typed; these are compared as text.
    """
    if spec.get("format") == 1:
        return bool(spec.get("set") == dict(wanted.options))
    own, setup = spec["options"], Setup(ALGORITHMS[wanted.algorithm](), LocalTraining())
    changed: dict[str, Any] = {}
    for name, text in wanted.options:
        full = setup.full_name(name)
        changed[full] = setup.with_option(name, text).options()[full]
    return set(spec["changed"]) <= changed.keys() and all(
        str(own.get(name)) == ("none" if value is None else str(value))
        for name, value in changed.items()
    )


def _has_cohort(spec: Mapping[str, Any], wanted: Spec) -> bool:
    """Return whether the cohort is the study's, or else that of the paper's task."""
    if wanted.cohort is not None:
        return bool(wanted.cohort == spec.get("cohort", 0))
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
    """Return a setting in which two runs differ that should differ in their seed alone.

    An option that only one of them has was added by a later version, and is at its default.
    """
    for name in ("cohort", "clients"):
        if first.spec.get(name) != second.spec.get(name):
            return name
    one, other = first.spec.get("options", {}), second.spec.get("options", {})
    return next((name for name in one if one[name] != other.get(name, one[name])), None)


def _left_out(
    plan: Plan, task: str, found: Mapping[str, Sequence[StoredRun]], superseded: Sequence[str]
) -> str:
    """Return why a task is left out; empty if it is not."""
    study, arms = plan.study, [arm.series for arm in plan.arms(task)]
    missing = [series for series in arms if series not in found]
    again = [series for series in missing if series in superseded]
    if again and (study.needs_all_arms or not found):
        return f"{task} is left out: {', '.join(again)} {SUPERSEDED}"
    if missing and not found:
        return f"{task} is left out: it has not been run"
    if missing and study.needs_all_arms:
        return f"{task} is left out: {len(found)} of its {len(arms)} settings have been run"
    return ""


def _shrunk(plan: Plan, found: Found, superseded: Mapping[str, Sequence[str]]) -> list[str]:
    """Return how the runs are fewer or smaller than the paper's."""
    lines, study = [], plan.study
    if plan.rounds != study.rounds:
        lines.append(f"{count(plan.rounds, 'round')} instead of {study.rounds:,}")
    for task, own in found.items():
        absent = [arm.series for arm in plan.arms(task) if arm.series not in own]
        again = [series for series in absent if series in superseded[task]]
        missing = [series for series in absent if series not in again]
        lines += [f"{task}: {', '.join(missing)} not run"] if missing else []
        lines += [f"{task}: {', '.join(again)} {SUPERSEDED}"] if again else []
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
