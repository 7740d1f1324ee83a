"""The content of a report: stored runs as sections and series, their settings and targets.

A `Section` holds the runs of one task. A `Series` is one line of its charts: the seeds of one
algorithm with one choice of settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.analysis.plots import COLOURS
from fedexp.analysis.summary import Band, Curve, metric_band
from fedexp.errors import FedExPError, UsageError, unknown_name
from fedexp.local import LocalTraining
from fedexp.options import Setup, convert
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.spec import Outcome, checked_target

WINDOW = 20  # rounds of the moving average, as in the paper
# Fields of a spec that are not settings of a series; options are, by their own names.
NOT_SETTINGS = (
    *("format", "id", "task", "algorithm", "seed"),
    *("set", "changed", "arguments", "options"),
)
Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Series:
    """The runs that are drawn as one line.

    Attributes:
        label: the algorithm, with its settings where it has several series.
        algorithm: its name alone.
        variant: index among the series of its algorithm.
        runs: one per seed.
    """

    label: str
    algorithm: str
    variant: int
    runs: tuple[StoredRun, ...]

    @property
    def settings(self) -> Settings:
        return settings(self.runs[0])

    def outcomes(self) -> list[Outcome]:
        return [run.outcome() for run in self.runs]

    def curves(self, name: str) -> list[Curve]:
        """Return one curve per seed."""
        return [outcome.curve(name) for outcome in self.outcomes()]

    def band(self, name: str, window: int = 1) -> Band:
        """Return mean and spread of the curves, within the bounds of the metric."""
        return metric_band(name, self.curves(name), window)


@dataclass(frozen=True, eq=False)
class Section:
    """A task with its options, and the series of its runs."""

    title: str
    task: str
    series: tuple[Series, ...]

    @property
    def runs(self) -> list[StoredRun]:
        return [run for series in self.series for run in series.runs]

    @cached_property
    def names(self) -> set[str]:
        """All record fields that have a number in some round."""
        rows = (row for run in self.runs for row in run.rows)
        return {name for row in rows for name, value in row.items() if _is_number(value)}


def load_all(paths: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """Return the runs in the folders, and a line for each that is unreadable or a duplicate."""
    runs: dict[str, StoredRun] = {}
    problems = []
    for folder in dict.fromkeys(path.resolve() for path in find_runs(paths)):
        try:
            run = load_run(folder)
        except FedExPError as error:
            problems.append(f"left out: {error}")
            continue
        key = repr((_task_key(run), run.spec["algorithm"], run.spec["seed"], settings(run)))
        other = runs.get(key)
        if other is not None:
            problems.append(f"{folder}: the same run as {other.folder}; the longer one counts")
        if other is None or len(run.rows) > len(other.rows):
            runs[key] = run
    return list(runs.values()), problems


def sections(runs: Sequence[StoredRun]) -> list[Section]:
    """Return one section per task, its series in the order of the palette."""
    if not runs:
        raise UsageError("no runs found; name folders that `fedexp run` or `compare` wrote")
    by_task: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_task.setdefault(_task_title(run), []).append(run)
    return [Section(title, own[0].spec["task"], _series(own)) for title, own in by_task.items()]


def settings(run: StoredRun) -> Settings:
    """Return everything that determines a run except task, algorithm and seed, by dotted name."""
    plain = {name: value for name, value in run.spec.items() if name not in NOT_SETTINGS}
    return {**plain, **run.spec.get("options", {})}


def status(run: StoredRun) -> str:
    """Return how a run ended."""
    if run.result is None:
        return f"unfinished: {len(run.rows)} of {run.spec['rounds']} rounds"
    if run.result.get("diverged_at") is not None:
        return f"diverged at round {run.result['diverged_at']}"
    return "stopped at its target" if run.result.get("status") == "target" else "finished"


def value_text(value: Any, digits: int = 6) -> str:
    """Format a setting: few digits, and words for booleans and None.

    >>> value_text(10**-2.5), value_text(True), value_text(None)
    ('0.00316228', 'yes', 'none')
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def differing(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose value is not the same everywhere.

    >>> differing([{"eps": 0.1, "lr": 1.0}, {"eps": 0.2, "lr": 1.0, "mu": 0.0}])
    ['eps', 'mu']
    """
    names = dict.fromkeys(name for variant in variants for name in variant)
    return [n for n in names if len({repr(variant.get(n)) for variant in variants}) > 1]


def _series(runs: Sequence[StoredRun]) -> tuple[Series, ...]:
    by_algorithm: dict[str, dict[str, list[StoredRun]]] = {}
    for run in runs:
        variants = by_algorithm.setdefault(run.spec["algorithm"], {})
        variants.setdefault(repr(settings(run)), []).append(run)
    order = list(COLOURS)
    known = sorted(by_algorithm, key=lambda n: (order.index(n) if n in order else len(order), n))
    return tuple(series for name in known for series in _variants(name, by_algorithm[name]))


def _variants(algorithm: str, variants: Mapping[str, list[StoredRun]]) -> list[Series]:
    each = [settings(group[0]) for group in variants.values()]
    names = differing(each)
    labels = _labels(algorithm, [{name: own.get(name) for name in names} for own in each])
    groups = sorted(zip(labels, variants.values(), strict=True), key=lambda pair: pair[0])
    return [
        Series(label, algorithm, at, tuple(sorted(runs, key=lambda run: run.spec["seed"])))
        for at, (label, runs) in enumerate(groups)
    ]


def _labels(algorithm: str, variants: Sequence[Settings]) -> list[str]:
    """Return a label for each choice of settings, with as few digits as make them differ."""
    labels: list[str] = []
    for digits in (3, 6, 17):
        texts = [
            [f"{name.removeprefix('server.')}={value_text(v, digits)}" for name, v in own.items()]
            for own in variants
        ]
        labels = [f"{algorithm} ({', '.join(pairs)})" if pairs else algorithm for pairs in texts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _task_key(run: StoredRun) -> tuple[str, tuple[tuple[str, str], ...]]:
    chosen = {k: v for k, v in run.spec.get("set", {}).items() if k.startswith("task.")}
    return run.spec["task"], tuple(sorted(chosen.items()))


def _task_title(run: StoredRun) -> str:
    task, options = _task_key(run)
    pairs = ", ".join(f"{name.removeprefix('task.')}={value}" for name, value in options)
    return f"{task} ({pairs})" if pairs else task


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def common_and_differing(every: Sequence[Series]) -> tuple[Settings, list[str]]:
    """Return the settings that all series share, and the names of those to list per series.

    A setting that only some algorithms have is listed where it is not at its default.
    """
    names = differing([series.settings for series in every])
    common = {name: v for name, v in every[0].settings.items() if name not in names}
    return common, [name for name in names if _is_notable(name, every)]


def _is_notable(name: str, every: Sequence[Series]) -> bool:
    having = [series for series in every if name in series.settings]
    values = {str(series.settings[name]) for series in having}  # a spec has infinity as text
    defaults = {str(_defaults(series.algorithm).get(name)) for series in having}
    return len(values) > 1 or values != defaults


@cache
def _defaults(algorithm: str) -> dict[str, Any]:
    if algorithm not in ALGORITHMS:
        return {}
    return Setup(ALGORITHMS[algorithm](), LocalTraining()).options()


@dataclass(frozen=True)
class Targets:
    """Targets given by the user; the default is the task's own."""

    general: float | None = None
    by_task: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Targets:
        """Parse `VALUE`, for all tasks, or `TASK=VALUE`.

        >>> Targets.parse(["digits=0.9", "84"])
        Targets(general=84.0, by_task={'digits': 0.9})
        """
        general, by_task = None, {}
        for text in texts:
            task, equals, value = text.rpartition("=")
            number = convert(value, float, "--target")
            if equals:
                by_task[task] = number
            else:
                general = number
        return cls(general, by_task)

    def check(self, sections: Sequence[Section]) -> None:
        """Raise `UsageError` for a target of a task that has no run."""
        known = {section.task for section in sections}
        for name in self.by_task:
            if name not in known:
                raise unknown_name("task of --target", name, known)

    def of(self, section: Section, metric: str) -> float | None:
        """Return the target of a section's metric, or None."""
        named = self.by_task.get(section.task, self.general)
        if named is not None:
            return checked_target(named, metric, "--target")
        known = section.runs[0].environment
        return known.get("target") if known.get("metric") == metric else None
