"""Seeds that some runs of a task have and others have not yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedexp.runs.spec import Outcome
from tools.results.gather import Results, Studied
from tools.results.words import algorithm_name, task_name

Series = Mapping[str, Sequence[Outcome]]


def behind(studied: Studied) -> list[str]:
    """A line for each series of a study that lacks a seed which another one of its task has."""
    return [
        line
        for task, series in studied.groups.items()
        for line in _lacking(task, series, seeds_of(series))
    ]


def released_behind(results: Results) -> list[str]:
    """The same for what was run as the released code does it, beside the paper's form."""
    paper, other = (each["table1"].groups for each in (results.studies, results.released))
    return [
        line
        for task, series in other.items()
        for line in _lacking(task, series, seeds_of(paper.get(task, {}), series))
    ]


def seeds_of(series: Series, names: Series | None = None) -> set[int]:
    """All seeds of some series; of all of them by default."""
    chosen = series if names is None else [name for name in names if name in series]
    return {run.spec.seed for name in chosen for run in series[name]}


def _lacking(task: str, series: Series, wanted: set[int]) -> list[str]:
    lines = []
    for name, runs in series.items():
        if lacks := sorted(wanted - {run.spec.seed for run in runs}):
            which = " and ".join(f"seed {seed}" for seed in lacks)
            lines.append(f"{task_name(task)}: {algorithm_name(name)} without {which}")
    return lines
