"""Mean and spread over seeds that need not be of one length.

Runs into sections, one a task, and series: the seeds of one algorithm with one setting.

What the series of a section have in common, and what sets them apart.

Which value of its metric counts as reached, task by task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.algorithms import ALGORITHMS
from fedexp.analysis.plots import COLOURS
from fedexp.analysis.summary import spread_of
from fedexp.errors import FedExPError, UsageError, unknown_name
from fedexp.local import LocalTraining
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.options import Setup, convert
from fedexp.runs.spec import Outcome, checked_target

Curve = np.ndarray[Any, np.dtype[np.float64]]
WINDOW = 20  # rounds; as in the paper


@dataclass(frozen=True, eq=False)
class Spread:
    """What is drawn of the seeds of an algorithm, at the rounds that any of them was evaluated.

    Attributes:
        rounds: counted from 1.
        mean: over the seeds that have a value there.
        std: their standard deviation; 0 where there is one value.
        low: mean - std; the least value where that would leave the positive numbers, which a log
            axis cannot show.
        high: mean + std, or what no value can exceed.
        seeds: how many seeds have a value there.
    """

    rounds: Curve
    mean: Curve
    std: Curve
    low: Curve
    high: Curve
    seeds: Curve


def spread(curves: Sequence[Curve], window: int = 1, top: float = np.inf) -> Spread:
    """Pool the curves round by round; where a seed has ended the others go on.

    With a window, each round pools the last `window` rounds of the seeds that are still there, as
    the paper does in its long runs (App. D.5). `top` is what no value can exceed.

    >>> pooled = spread([np.array([1.0, 2.0, 9.0]), np.array([3.0, np.nan])])
    >>> pooled.mean.tolist(), pooled.seeds.tolist()
    ([2.0, 2.0, 9.0], [2.0, 1.0, 1.0])
    """
    padded = np.full((len(curves), max((len(curve) for curve in curves), default=0)), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    here = ~np.isnan(padded)
    known = np.flatnonzero(here.any(axis=0))
    pools = [_pool(padded[here[:, at], max(0, at + 1 - window) : at + 1]) for at in known]
    mean = np.array([pool.mean() for pool in pools])
    std = np.array([spread_of(pool) or 0.0 for pool in pools])
    least = np.array([pool.min() for pool in pools])
    low = np.where((mean <= std) & (least > 0), least, mean - std)
    rounds, seeds = (known + 1).astype(np.float64), here.sum(axis=0)[known].astype(np.float64)
    return Spread(rounds, mean, std, low, np.minimum(mean + std, top), seeds)


def _pool(values: Curve) -> Curve:
    """The values that are there."""
    return values[~np.isnan(values)]


def spans_decades(curves: Sequence[Curve]) -> bool:
    """A log scale helps where positive values differ by more than a hundred times."""
    known = _pool(np.concatenate([*curves, np.empty(0)]))
    return bool(known.size and known.min() > 0 and known.max() / known.min() > 100)


IDENTITY = (
    *("format", "id", "task", "algorithm", "seed"),
    *("set", "changed", "arguments", "options"),
)
Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Series:
    """The runs that are drawn as one line.

    Attributes:
        label: the algorithm, with what sets it apart where it comes in several settings.
        algorithm: its name alone.
        variant: which of its algorithm's settings this is, counted from 0.
        runs: one a seed.
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
        """One curve a seed."""
        return [outcome.curve(name) for outcome in self.outcomes()]

    def spread(self, name: str, window: int = 1) -> Spread:
        """Mean and spread of the curves; no accuracy is above 1."""
        top = 1.0 if name.endswith("accuracy") else math.inf
        return spread(self.curves(name), window, top)


@dataclass(frozen=True, eq=False)
class Section:
    """A task with its options, and the series that were run on it."""

    title: str
    task: str
    series: tuple[Series, ...]

    @property
    def runs(self) -> list[StoredRun]:
        return [run for series in self.series for run in series.runs]

    @cached_property
    def names(self) -> set[str]:
        """Everything that any round has a number for."""
        rows = (row for run in self.runs for row in run.rows)
        return {name for row in rows for name, value in row.items() if _is_number(value)}


def load_all(paths: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """The runs in the folders, and a line for each that cannot be read or is there twice."""
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
    """One section a task; within it the series in the order of the palette."""
    if not runs:
        raise UsageError("no runs found; name folders that `fedexp run` or `compare` wrote")
    by_task: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_task.setdefault(_task_title(run), []).append(run)
    return [Section(title, own[0].spec["task"], _series(own)) for title, own in by_task.items()]


def settings(run: StoredRun) -> Settings:
    """All that decides a run but its task, algorithm and seed, by dotted name."""
    plain = {name: value for name, value in run.spec.items() if name not in IDENTITY}
    return {**plain, **run.spec.get("options", {})}


def status(run: StoredRun) -> str:
    """How a run ended, in words."""
    if run.result is None:
        return f"unfinished: {len(run.rows)} of {run.spec['rounds']} rounds"
    if run.result.get("diverged_at") is not None:
        return f"diverged at round {run.result['diverged_at']}"
    return "stopped at its target" if run.result.get("status") == "target" else "finished"


def value_text(value: Any, digits: int = 6) -> str:
    """A setting as it is shown: few digits, and words for what is not a number.

    >>> value_text(10**-2.5), value_text(True), value_text(None)
    ('0.00316228', 'yes', 'none')
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def differing(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that do not have one value everywhere.

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
    apart = differing(each)
    labels = _labels(algorithm, [{name: own.get(name) for name in apart} for own in each])
    groups = sorted(zip(labels, variants.values(), strict=True), key=lambda pair: pair[0])
    return [
        Series(label, algorithm, at, tuple(sorted(runs, key=lambda run: run.spec["seed"])))
        for at, (label, runs) in enumerate(groups)
    ]


def _labels(algorithm: str, variants: Sequence[Settings]) -> list[str]:
    """A name for each setting of an algorithm: as few digits as keep them apart."""
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


def shared_and_apart(every: Sequence[Series]) -> tuple[Settings, list[str]]:
    """The settings of all series, and the names of those worth a column of their own.

    A name that only some algorithms have is worth one where it is not at its default.
    """
    apart = differing([series.settings for series in every])
    shared = {name: v for name, v in every[0].settings.items() if name not in apart}
    return shared, [name for name in apart if _matters(name, every)]


def _matters(name: str, every: Sequence[Series]) -> bool:
    having = [series for series in every if name in series.settings]
    values = {str(series.settings[name]) for series in having}  # a spec has infinity in words
    defaults = {str(_defaults(series.algorithm).get(name)) for series in having}
    return len(values) > 1 or values != defaults


@cache
def _defaults(algorithm: str) -> dict[str, Any]:
    if algorithm not in ALGORITHMS:
        return {}
    return Setup(ALGORITHMS[algorithm](), LocalTraining()).options()


@dataclass(frozen=True)
class Targets:
    """Targets that the user has named; without one, a task's own counts."""

    general: float | None = None
    by_task: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Targets:
        """From `VALUE`, for all tasks, or `TASK=VALUE`.

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
        """A target of a task that has no run is a mistake."""
        known = {section.task for section in sections}
        for name in self.by_task:
            if name not in known:
                raise unknown_name("task of --target", name, known)

    def of(self, section: Section, metric: str) -> float | None:
        """The target of a section's metric, where there is one."""
        named = self.by_task.get(section.task, self.general)
        if named is not None:
            return checked_target(named, metric, "--target")
        known = section.runs[0].environment
        return known.get("target") if known.get("metric") == metric else None
