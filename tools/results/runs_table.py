"""Every run of the archive: how it ended, how long it took, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from fedexp.reproduce.from_runs import SUPERSEDED, is_superseded
from fedexp.reproduce.measures import final
from fedexp.reproduce.published import text_of
from fedexp.reproduce.study import arithmetic_of
from fedexp.runs import StoredRun, spec_from
from tools.results.gather import Results
from tools.results.words import algorithm_name, paragraphs, plural, table, task_name

Machine = tuple[str, ...]
ABOUT = ("device", "fedexp", "torch", "numpy", "python")


def machines(results: Results) -> str:
    """Hardware, versions and notes, each with a letter, the number of runs and their time."""
    if not results.runs:
        return "No runs yet."
    letters, rows = _letters(results.runs), []
    for machine, letter in letters.items():
        own = [run for run in results.runs if _machine(run) == machine]
        days = sorted({str(run.environment.get("started", ""))[:10] for run in own})
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        *about, note = machine
        rows.append([letter, *about, str(len(own)), _minutes(own), when, note])
    headers = ["", *ABOUT, "runs", "minutes in all", "made on", "note"]
    total = f"{plural(len(results.runs), 'run')}, {_minutes(results.runs)} minutes in all."
    return paragraphs(total, table(headers, rows, words=6))


def runs(results: Results) -> str:
    """One line a run."""
    if not results.runs:
        return "No runs yet."
    headers = ["task", "algorithm", "settings", "mode", "seed", "rounds", "ended"]
    headers += ["final test accuracy", "arithmetic", "seconds", "on"]
    letters = _letters(results.runs)
    ordered = sorted(results.runs, key=_order)
    return table(headers, [_cells(run, letters[_machine(run)]) for run in ordered], words=4)


def _cells(run: StoredRun, letter: str) -> list[str]:
    spec, outcome = run.spec, run.outcome()
    settings = ", ".join(f"{name}={_short(value)}" for name, value in spec["set"].items())
    ended = outcome.status
    if outcome.diverged_at is not None:
        ended = f"diverged at {outcome.diverged_at}"
    if is_superseded(run):
        ended += f"; {SUPERSEDED}"
    return [
        task_name(spec["task"]),
        algorithm_name(spec["algorithm"]),
        settings,
        spec["mode"],
        str(spec["seed"]),
        str(len(run.rows)),
        ended,
        text_of(final([outcome], "test_accuracy"), "%"),
        arithmetic_of(spec_from(spec)),
        f"{outcome.seconds:,.1f}",
        letter,
    ]


def _short(value: str) -> str:
    """A number with few digits; a word as it is.

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
    about = (str(run.environment.get(name, "?")) for name in ABOUT)
    return *about, str(run.environment.get("note", ""))


def _letters(found: Sequence[StoredRun]) -> dict[Machine, str]:
    """A to Z by the time of the first run."""
    by_time = sorted(found, key=lambda run: str(run.environment.get("started", "")))
    different = dict.fromkeys(_machine(run) for run in by_time)
    return {machine: ascii_uppercase[at % 26] for at, machine in enumerate(different)}


def _minutes(found: Sequence[StoredRun]) -> str:
    return f"{sum(run.outcome().seconds for run in found) / 60:,.1f}"
