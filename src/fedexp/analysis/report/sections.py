"""The content of a report: stored runs as sections and series, their settings, goals and targets.

A `Section` holds the runs of one task. A `Series` is one line of its charts: the seeds of one
algorithm with one choice of settings, whatever their number of rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.analysis import summary
from fedexp.analysis.plots import COLOURS, Style, styles
from fedexp.analysis.summary import Band, Curve
from fedexp.errors import FedExPError, UsageError, check_name, is_number, require
from fedexp.local import LocalTraining
from fedexp.options import OVER_ROUNDS, Setup
from fedexp.plain import TYPED
from fedexp.runs import StoredRun, find_runs, load_run
from fedexp.runs.fingerprint import Fingerprint, joined
from fedexp.runs.folder import read_fingerprint
from fedexp.runs.spec import Outcome
from fedexp.tasks.recipe import Goal, checked_target, parse_goal
from fedexp.text import convert

WINDOW = 20  # rounds of the moving average, as in the paper
# Fields of a spec that are not settings of a series; options are, by their own names.
NOT_SETTINGS = ("format", "id", "task", "algorithm", "seed", "arguments", "options", *TYPED)
# The beginnings of the names in a fingerprint that may differ between the seeds of a series.
BY_SEED = ("the initial", "the training data", "the test data", "the clients' shares")
Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Series:
    """The runs that are drawn as one line.

    Attributes:
        label: the algorithm, with its settings where it has several series.
        algorithm: its name alone.
        runs: one per seed; their numbers of rounds may differ.
        style: colours of the algorithm, the same in all sections, and the dashes of the series.
    """

    label: str
    algorithm: str
    runs: tuple[StoredRun, ...]
    style: Style

    @property
    def settings(self) -> Settings:
        """The settings of its runs; the number of rounds as a range where it differs."""
        numbers = sorted({run.spec["rounds"] for run in self.runs})
        rounds = numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        return {**settings(self.runs[0]), "rounds": rounds}

    @property
    def seeds(self) -> int:
        """The number of seeds whose mean is complete: without runs that were given fewer rounds."""
        usual = summary.common_length([run.spec["rounds"] for run in self.runs])
        return sum(run.spec["rounds"] >= usual for run in self.runs)

    def outcomes(self) -> list[Outcome]:
        return [run.outcome() for run in self.runs]

    def curves(self, name: str) -> list[Curve]:
        """Return one curve per seed."""
        return [outcome.curve(name) for outcome in self.outcomes()]

    def band(self, name: str, window: int = 1) -> Band:
        """Return mean and spread of the curves, within the bounds of the metric."""
        return summary.metric_band(name, self.curves(name), window)


@dataclass(frozen=True, eq=False)
class Section:
    """A task with its options, and the series of its runs.

    Attributes:
        title: the task, with its options.
        task: its name.
        series: in the order of the palette.
        chosen: what to judge by, instead of the task's goal.
    """

    title: str
    task: str
    series: tuple[Series, ...]
    chosen: Goal | None = None

    @property
    def runs(self) -> list[StoredRun]:
        return [run for series in self.series for run in series.runs]

    @cached_property
    def goal(self) -> Goal | None:
        """What the runs are judged by; None where neither they nor the user state it."""
        if self.chosen is not None and self.chosen.metric in self.names:
            return self.chosen
        recorded = [run.environment.get("goal") for run in self.runs]
        recorded += [run.environment.get("metric") for run in self.runs]
        for text in recorded:
            with suppress(UsageError):
                return parse_goal(str(text))
        return None

    def direction(self, metric: str) -> bool | None:
        """Return whether larger values are better; None where neither goal nor name show it."""
        if self.goal is not None and self.goal.metric == metric:
            return self.goal.higher
        if summary.is_accuracy(metric):
            return True
        return False if metric.endswith("loss") else None

    @cached_property
    def references(self) -> dict[str, str]:
        """For each series the one of FedAvg that speed-ups are over: that of the nearest settings.

        By label; empty without a run of FedAvg.
        """
        candidates = [series for series in self.series if series.algorithm == summary.REFERENCE]
        if not candidates:
            return {}
        return {
            series.label: min(candidates, key=partial(_distance, series)).label
            for series in self.series
        }

    @cached_property
    def names(self) -> set[str]:
        """All record fields that have a number in some round."""
        rows = (row for run in self.runs for row in run.rows)
        return {name for row in rows for name, value in row.items() if is_number(value)}


def load_runs(paths: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """Return all runs in the folders, and a line for each that is unreadable."""
    runs, problems = [], []
    for folder in dict.fromkeys(path.resolve() for path in find_runs(paths)):
        try:
            runs.append(load_run(folder))
        except FedExPError as error:
            problems.append(f"left out: {error}")
    return runs, problems


def distinct(runs: Iterable[StoredRun]) -> tuple[list[StoredRun], list[str]]:
    """Return the runs without repetitions, and a line for what is left out or of other content.

    Of the same task, algorithm, seed and settings the longest run counts: a run of fewer rounds is
    the beginning of the longer one.
    """
    longest: dict[str, StoredRun] = {}
    problems, parts = [], []
    for run in runs:
        key = repr((_task_key(run), run.spec["algorithm"], run.spec["seed"], _identity(run)))
        other = longest.get(key)
        if other is not None and run.spec["rounds"] == other.spec["rounds"]:
            problems.append(f"{run.folder}: the same run as {other.folder}; the longer one counts")
        elif other is not None:
            parts.append(min(run, other, key=lambda run: len(run.rows)).folder.name)
        if other is None or len(run.rows) > len(other.rows):
            longest[key] = run
    if parts:
        verb = "is the beginning of a longer run" if len(parts) == 1 else "are parts of longer runs"
        problems.append(f"{', '.join(parts)} {verb}; the longer one counts")
    return list(longest.values()), [*problems, *_mixed(longest.values())]


def _mixed(runs: Iterable[StoredRun]) -> list[str]:
    """Return a line for each series whose runs have another loss, model or code than the first."""
    first: dict[str, tuple[StoredRun, Fingerprint]] = {}
    problems: dict[str, str] = {}
    for run in runs:
        try:
            content = read_fingerprint(run.folder)
        except FedExPError:  # a damaged one matters to those who resume the run
            continue
        key = repr((_task_key(run), run.spec["algorithm"], _identity(run)))
        other, wanted = first.setdefault(key, (run, content))
        apart = [name for name in wanted.differences(content) if not name.startswith(BY_SEED)]
        if apart and key not in problems:
            verb = "differs" if len(apart) == 1 else "differ"
            problems[key] = (
                f"{run.folder} and {other.folder.name} are seeds of one series, but "
                f"{joined(apart)} {verb}; leave one out with --exclude"
            )
    return list(problems.values())


def sections(runs: Sequence[StoredRun], chosen: Goal | None = None) -> list[Section]:
    """Return one section per task; `chosen` is what to judge by, instead of the tasks' goals."""
    if not runs:
        raise UsageError("no runs found; name folders that `fedexp run` or `compare` wrote")
    by_task: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_task.setdefault(_task_title(run), []).append(run)
    looks = styles(sorted({run.spec["algorithm"] for run in runs}))
    return [
        Section(title, group[0].spec["task"], _series(group, looks), chosen)
        for title, group in by_task.items()
    ]


def settings(run: StoredRun) -> Settings:
    """Return everything that determines a run except task, algorithm and seed, by dotted name."""
    plain = {name: value for name, value in run.spec.items() if name not in NOT_SETTINGS}
    return {**plain, **effective_options(run.spec.get("options", {}))}


def _identity(run: StoredRun) -> Settings:
    """Return the settings that separate series.

    The number of rounds is one where it decides what happens in the first of them: a schedule over
    all rounds, or the noise of a privacy budget.
    """
    identity = settings(run)
    schedules = {identity.get(name) for name in ("local.lr_schedule", "server_schedule")}
    over_run = "local.step_schedule_over" in identity  # which a spec has for "run" only
    if not (schedules & set(OVER_ROUNDS) or over_run or "privacy" in identity):
        del identity["rounds"]
    return identity


def _distance(one: Series, other: Series) -> int:
    """Return the number of settings that both series have, with other values."""
    first, second = _identity(one.runs[0]), _identity(other.runs[0])
    return sum(first[name] != second[name] for name in first.keys() & second.keys())


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


def _series(runs: Sequence[StoredRun], looks: Mapping[str, Style]) -> tuple[Series, ...]:
    by_algorithm: dict[str, dict[str, list[StoredRun]]] = {}
    for run in runs:
        variants = by_algorithm.setdefault(run.spec["algorithm"], {})
        variants.setdefault(repr(_identity(run)), []).append(run)
    order = list(COLOURS)
    names = sorted(by_algorithm, key=lambda n: (order.index(n) if n in order else len(order), n))
    return tuple(
        series for name in names for series in _variants(name, by_algorithm[name], looks[name])
    )


def _variants(
    algorithm: str, variants: Mapping[str, list[StoredRun]], style: Style
) -> list[Series]:
    names = _telling([group[0] for group in variants.values()])
    identities = [_identity(group[0]) for group in variants.values()]
    chosen = [{name: identity.get(name) for name in names} for identity in identities]
    for settings in chosen:
        if settings.get("local.steps", 0) is None:  # epochs count
            del settings["local.steps"]
    labels = _labels(algorithm, chosen)
    groups = sorted(zip(labels, variants.values(), strict=True), key=lambda pair: pair[0])
    return [
        Series(
            label,
            algorithm,
            tuple(sorted(runs, key=lambda run: run.spec["seed"])),
            replace(style, dash=style.dash + at),
        )
        for at, (label, runs) in enumerate(groups)
    ]


def _telling(runs: Sequence[StoredRun]) -> list[str]:
    """Return the settings that a label needs: those that differ and that a user has set.

    Others are in it only where they separate runs that are the same without them: a mode, for
    instance, but not the ten options that it changes.
    """
    identities = [_identity(run) for run in runs]
    typed = {name for run in runs for name in run.spec.get("changed", run.spec.get("set", {}))}
    names = differing(identities)
    chosen = [name for name in names if not typed.isdisjoint((name, name.partition(".")[2]))]
    for name in names:
        if _parts(identities, [*chosen, name]) > _parts(identities, chosen):
            chosen.append(name)
    return [name for name in names if name in chosen]


def _parts(identities: Sequence[Settings], names: Sequence[str]) -> int:
    """Return how many of the settings these names distinguish."""
    return len({repr([settings.get(name) for name in names]) for settings in identities})


def _labels(algorithm: str, variants: Sequence[Settings]) -> list[str]:
    """Return a label for each choice of settings, with as few digits as make them differ."""
    labels: list[str] = []
    for digits in (3, 6, 17):
        texts = [
            [f"{n.removeprefix('server.')}={value_text(v, digits)}" for n, v in settings.items()]
            for settings in variants
        ]
        labels = [f"{algorithm} {', '.join(pairs)}" if pairs else algorithm for pairs in texts]
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
    """Targets given by the user, of all tasks or by task; the default is the task's own."""

    general: float | Sequence[float] = ()
    by_task: Mapping[str, float | Sequence[float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Targets:
        """Parse `VALUE,VALUE,...`, for all tasks, or `TASK=VALUE,...`.

        >>> Targets.parse(["digits=0.9,0.94", "84"])
        Targets(general=(84.0,), by_task={'digits': (0.9, 0.94)})
        """
        general: tuple[float, ...] = ()
        by_task: dict[str, tuple[float, ...]] = {}
        for text in texts:
            task, equals, listed = text.rpartition("=")
            numbers = tuple(convert(value, float, "--target") for value in listed.split(","))
            if equals:
                by_task[task] = by_task.get(task, ()) + numbers
            else:
                general += numbers
        return cls(general, by_task)

    def check(self, sections: Sequence[Section]) -> None:
        """Raise `UsageError` for a target of a task that has no run."""
        tasks = {section.task for section in sections}
        for name in self.by_task:
            check_name("task of --target", name, tasks)

    def of(self, section: Section, metric: str) -> list[float]:
        """Return the targets of a section's metric."""
        chosen = self.by_task.get(section.task, self.general)
        targets = chosen if isinstance(chosen, Sequence) else (chosen,)
        if not targets:
            recorded = section.runs[0].environment
            target = recorded.get("target") if recorded.get("metric") == metric else None
            return [] if target is None else [target]
        require(
            section.direction(metric) is not None,
            f"--target needs to know whether a larger {metric} is better; write --metric "
            f"max:{metric} or min:{metric}",
        )
        # a value above 1 shows that an accuracy is the user's own, in percent
        curves = [curve for series in section.series for curve in series.curves(metric)]
        in_percent = any((curve > 1).any() for curve in curves)
        checked = (checked_target(value, metric, "--target", in_percent) for value in targets)
        return list(dict.fromkeys(value for value in checked if value is not None))


def effective_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without the number of steps where epochs count.

    >>> effective_options({"local.lr": 0.1, "local.steps": None, "local.epochs": 2})
    {'local.lr': 0.1, 'local.epochs': 2}
    """
    return {n: v for n, v in options.items() if n != "local.steps" or v not in (None, "none")}
