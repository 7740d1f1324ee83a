"""The commands that make the runs of an archive again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedexp.runs import StoredRun
from fedexp.runs.folder import rerun as rerun_one
from fedexp.runs.spec import Outcome
from tools.results.gather import Results, Studied

Series = Mapping[str, Sequence[Outcome]]
Made = set[str]  # names of runs


def rerun(results: Results) -> str:
    """A line a study and task where that makes these runs and no others; else a line a run."""
    lines: list[str] = []
    made: Made = set()
    for studied in results.every:
        for task, series in studied.groups.items():
            names = _names(series, seeds := whole_seeds(studied, task))
            if seeds and not names <= made:
                lines.append(command(studied, task, seeds))
                made |= names
    lines += [rerun_one(run.spec) for run in _by_name(results.runs) if run.folder.name not in made]
    return "\n".join(["```sh", *lines, "```"]) if lines else "No runs yet."


def whole_seeds(studied: Studied, task: str) -> int:
    """How many seeds, from 0, every arm of a task has on one device; 0 where an arm is missing."""
    series = studied.groups[task]
    specs = [run.spec for runs in series.values() for run in runs]
    arms = {arm.series for arm in studied.plan.study.arms(task)}
    if arms != series.keys() or len({(s.device, s.precision) for s in specs}) > 1:
        return 0
    return min(_from_zero({run.spec.seed for run in runs}) for runs in series.values())


def command(studied: Studied, task: str, seeds: int) -> str:
    """`fedexp reproduce ...` for one task."""
    study, spec = studied.plan.study, next(iter(studied.groups[task].values()))[0].spec
    words = ["fedexp", "reproduce", study.name]
    words += ["--task", task] if len(study.tasks) > 1 else []
    words += ["--seeds", str(seeds)] if seeds != study.seeds[task] else []
    words += ["--mode", spec.mode] if spec.mode != "paper" else []
    words += ["--device", spec.device] if spec.device else []
    words += ["--precision", spec.precision] if spec.precision else []
    return " ".join(words)


def _names(series: Series, seeds: int) -> Made:
    """The runs that a command with that many seeds makes."""
    runs = [run for own in series.values() for run in own if run.spec.seed < seeds]
    return {run.folder.name for run in runs if run.folder is not None}


def _from_zero(seeds: set[int]) -> int:
    """How far the seeds go without a gap.

    >>> _from_zero({0, 1, 3})
    2
    """
    return next(number for number in range(len(seeds) + 1) if number not in seeds)


def _by_name(runs: Sequence[StoredRun]) -> list[StoredRun]:
    return sorted(runs, key=lambda run: (run.spec["task"], run.spec["algorithm"], run.spec["seed"]))
