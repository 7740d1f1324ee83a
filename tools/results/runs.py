"""The runs of the archive: how each ended, on which machine, and the commands that repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from fedexp.analysis.tables import count
from fedexp.experiment import Experiment
from fedexp.reproduce.measures import final
from fedexp.reproduce.published import text_of
from fedexp.reproduce.study import arithmetic_of
from fedexp.runs import StoredRun
from fedexp_command.rerun import rerun
from tools.results.archive import Archive, StoredStudy
from tools.results.format import NO_RUNS, algorithm_name, paragraphs, table, task_name

Machine = tuple[str, ...]
SEEDS = {"emnist": 5, "cifar10": 3, "cifar100": 3}  # planned here; the paper's for other tasks
GPU: dict[str, Any] = {"device": "cuda", "precision": "bf16"}
ENVIRONMENT = ("device", "fedexp", "torch", "numpy", "python")


def machines(archive: Archive) -> str:
    """Return hardware, versions and notes, each with a letter, its runs and their time."""
    if not archive.runs:
        return NO_RUNS
    letters, rows = _letters(archive.runs), []
    for machine, letter in letters.items():
        own = [run for run in archive.runs if _machine(run) == machine]
        days = sorted({str(run.environment.get("started", ""))[:10] for run in own})
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        *about, note = machine
        rows.append([letter, *about, str(len(own)), _minutes(own), when, note])
    headers = ["", *ENVIRONMENT, "runs", "minutes in all", "made on", "note"]
    total = f"{count(len(archive.runs), 'run')}, {_minutes(archive.runs)} minutes in all."
    return paragraphs(total, table(headers, rows, left=6))


def every_run(archive: Archive) -> str:
    """Return one line per run."""
    if not archive.runs:
        return NO_RUNS
    headers = ["task", "algorithm", "settings", "mode", "seed", "rounds", "ended"]
    headers += ["final test accuracy", "arithmetic", "seconds", "on"]
    letters = _letters(archive.runs)
    ordered = sorted(archive.runs, key=_order)
    return table(headers, [_cells(run, letters[_machine(run)]) for run in ordered], left=4)


def _cells(run: StoredRun, letter: str) -> list[str]:
    spec, outcome = run.spec, run.outcome()
    settings = ", ".join(f"{name}={_short(value)}" for name, value in spec["set"].items())
    ended = outcome.status
    if outcome.diverged_at is not None:
        ended = f"diverged at {outcome.diverged_at}"
    return [
        task_name(spec["task"]),
        algorithm_name(spec["algorithm"]),
        settings,
        spec["mode"],
        str(spec["seed"]),
        str(len(run.rows)),
        ended,
        text_of(final([outcome], "test_accuracy"), "%"),
        arithmetic_of(Experiment.of(spec)),
        f"{outcome.seconds:,.1f}",
        letter,
    ]


def _short(value: str) -> str:
    """Return a number with three digits; other text as it is.

    >>> _short("0.31622776601683794"), _short("batch")
    ('0.316', 'batch')
    """
    try:
        return f"{float(value):.3g}"
    except ValueError:
        return value


def _order(run: StoredRun) -> tuple[str, str, str, str, int]:
    spec = run.spec
    return spec["task"], spec["algorithm"], spec["mode"], repr(spec["set"]), int(spec["seed"])


def _machine(run: StoredRun) -> Machine:
    about = (str(run.environment.get(name, "?")) for name in ENVIRONMENT)
    return *about, str(run.environment.get("note", ""))


def _letters(runs: Sequence[StoredRun]) -> dict[Machine, str]:
    """Return a letter for each machine, A to Z by the time of its first run."""
    by_time = sorted(runs, key=lambda run: str(run.environment.get("started", "")))
    different = dict.fromkeys(_machine(run) for run in by_time)
    return {machine: ascii_uppercase[at % 26] for at, machine in enumerate(different)}


def _minutes(runs: Sequence[StoredRun]) -> str:
    return f"{sum(run.outcome().seconds for run in runs) / 60:,.1f}"


def commands(archive: Archive) -> str:
    """Return the commands that repeat the runs.

    One line per study and task where `fedexp reproduce` makes these runs and, apart from readings
    of eps, no others; one line per run for the rest.
    """
    lines: list[str] = []
    covered: set[str] = set()
    for stored in archive.every:
        for task, series in stored.groups.items():
            seeds = _common_seeds(stored, task)
            outcomes = [run for runs in series.values() for run in runs if run.seed < seeds]
            names = {run.folder.name for run in outcomes if run.folder is not None}
            if seeds and not names <= covered:
                lines.append(_reproduce_command(stored, task, seeds))
                covered |= names
    by_name = sorted(
        archive.runs, key=lambda run: (run.spec["task"], run.spec["algorithm"], run.spec["seed"])
    )
    lines += [rerun(run.spec) for run in by_name if run.folder.name not in covered]
    return "\n".join(["```sh", *lines, "```"]) if lines else NO_RUNS


def missing_commands(archive: Archive) -> str:
    """Return the commands that make the runs which the archive lacks, and no others."""
    lines = []
    for stored in archive.studies.values():
        for task in stored.plan.study.tasks:
            seeds = SEEDS.get(task, stored.plan.study.seeds[task])
            seeds = min(seeds, stored.plan.study.seeds[task])
            wanted = {(arm.series, s) for arm in stored.plan.arms(task) for s in range(seeds)}
            groups = stored.groups.get(task, {})
            if lacks := wanted - {(s, run.seed) for s, runs in groups.items() for run in runs}:
                command = _reproduce_command(stored, task, seeds, "--reuse", "results")
                lines.append(f"{command}  # {count(len(lacks), 'run')}")
    return "\n".join(["```sh", *lines, "```"]) if lines else "Nothing is missing."


def _common_seeds(stored: StoredStudy, task: str) -> int:
    """Return how many seeds, from 0, every arm has on one device; 0 if an arm is missing.

    Readings of eps may be missing.
    """
    series = stored.groups[task]
    specs = [run.spec for runs in series.values() for run in runs]
    arms = {arm.series for arm in stored.plan.arms(task) if arm.mode is None}
    if not arms <= series.keys() or len({(s.get("device"), s.get("precision")) for s in specs}) > 1:
        return 0
    return min(_from_zero({run.seed for run in runs}) for runs in series.values())


def _from_zero(seeds: set[int]) -> int:
    """Return the length of the run of consecutive seeds that starts at 0.

    >>> _from_zero({0, 1, 3})
    2
    """
    return next(number for number in range(len(seeds) + 1) if number not in seeds)


def _reproduce_command(stored: StoredStudy, task: str, seeds: int, *more: str) -> str:
    """Return the `fedexp reproduce` command for one task; images without runs are for a GPU."""
    study, series = stored.plan.study, stored.groups.get(task)
    spec: Mapping[str, Any] = {} if task == "synthetic" else GPU
    if series:
        spec = next(iter(series.values()))[0].spec
    words = ["fedexp", "reproduce", study.name]
    words += ["--task", task] if len(study.tasks) > 1 else []
    words += ["--seeds", str(seeds)] if seeds != study.seeds[task] else []
    words += more
    for name in ("mode", "device", "precision"):
        if spec.get(name, "paper") != "paper":
            words += [f"--{name}", spec[name]]
    return " ".join(words)
