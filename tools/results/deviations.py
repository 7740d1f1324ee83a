"""How our runs deviate from the paper's: eps, writers, seeds, arithmetic, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedexp.analysis.summary import numbers
from fedexp.analysis.tables import count
from fedexp.experiment import Experiment
from fedexp.reproduce.accuracy_studies import READINGS, Series, of_reading
from fedexp.reproduce.measures import final
from fedexp.reproduce.published import NOTHING, quantity, text_of
from fedexp.reproduce.study import ALL_WRITERS, arithmetic_of
from fedexp.runs.spec import Outcome
from tools.results.archive import RELEASED, Archive
from tools.results.format import (
    PRINTED,
    algorithm_name,
    bullets,
    table,
    task_name,
    with_task_name,
)
from tools.results.table1 import rounds_of

CIFAR = ("cifar10", "cifar100")


def eps_readings(archive: Archive) -> str:
    """Compare the readings of eps, wherever FedExP was run with more than one of them."""
    rows = []
    for task, series in archive.studies["table1"].groups.items():
        released = archive.released["table1"].groups.get(task, {})
        by_reading = {
            PRINTED: series.get("fedexp"),
            **{reading: series.get(of_reading("fedexp", reading)) for reading in READINGS},
            f"all of mode {RELEASED}": released.get("fedexp"),
        }
        cells = [_reading_cells(task, name, runs) for name, runs in by_reading.items() if runs]
        rows += cells if len(cells) > 1 else []
    if not rows:
        return "FedExP has not been run with two readings of eps on one task yet."
    headers = ["task", "eps", "rounds to target", "paper", "final test accuracy"]
    headers += ["median server step", "largest", "median share of eps", "seeds"]
    return table(headers, rows, left=2)


def _reading_cells(task: str, name: str, runs: Sequence[Outcome]) -> list[str]:
    steps, shares = (
        numbers(*(run.curve(name) for run in runs)) for name in ("server_lr", "eps_share")
    )
    return [
        task_name(task),
        name,
        text_of(rounds_of(task, runs), "rounds"),
        text_of(quantity("table1-rounds").find(task, "fedexp"), "rounds"),
        text_of(final(runs, "test_accuracy"), "%"),
        f"{np.median(steps):.2f}",
        f"{steps.max():.2f}",
        f"{100 * np.median(shares):.1f}%" if shares.size else NOTHING,
        str(len(runs)),
    ]


def extrapolated_rounds(archive: Archive) -> str:
    """Return how often each eps of Table 4 would leave a step above 1, by reading of eps.

    The norms are those of the stored runs on the CIFAR tasks, whose rows are flat in Table 4. A run
    with another eps would have others, so this is an estimate.
    """
    published, rows = quantity("epsilon-table"), []
    for task in CIFAR:
        values = published.values[task]
        rows.append([task_name(task), "paper: training accuracy", ""])
        rows[-1] += [text_of(value, "%") for value in values.values()]
        for mode, studies in {"paper": archive.studies, RELEASED: archive.released}.items():
            runs = studies["table1"].groups.get(task, {}).get("fedexp", ())
            runs = [run for run in runs if not np.isnan(run.curve("sq_norm_of_mean")).all()]
            if not runs:
                continue
            norms = f"mode {mode}, {count(len(runs), 'seed')}"
            for reading in (PRINTED, *READINGS):
                shares = [_extrapolated(runs, 10 ** float(eps[3:]), reading) for eps in values]
                rows.append([task_name(task), norms, reading, *(f"{x:.0%}" for x in shares)])
    headers = ["task", "norms of", "reading", *(f"eps {eps}" for eps in published.values[CIFAR[0]])]
    return table(headers, rows, left=3)


def _extrapolated(runs: Sequence[Outcome], eps: float, reading: str) -> float:
    """Return the part of all rounds of some runs in which the step would be above 1."""
    options = dict(READINGS.get(reading, ()))
    decay = float(options.get("server.eps_decay", 1))
    above = []
    for run in runs:
        squares, mean = run.curve("mean_sq_norm"), run.curve("sq_norm_of_mean")
        cohort = run.spec["cohort"]
        times = cohort if "server.eps_mode" in options else 1
        added = eps * times * decay ** np.arange(len(squares))
        above.append((squares > 2 * (mean + added))[~np.isnan(mean)])
    return float(np.mean(np.concatenate(above)))


def writers(archive: Archive) -> str:
    """Return how many of EMNIST's writers the runs had."""
    found = {run.spec["clients"] for run in archive.runs if run.spec["task"] == "emnist"}
    if not found:
        return "No run has used EMNIST yet."
    numbers = " or ".join(f"{number:,}" for number in sorted(found))
    return f"The runs have {numbers} of the {ALL_WRITERS:,} writers of federated EMNIST."


def seeds(archive: Archive) -> str:
    """Return the numbers of seeds of Table 1, ours and the paper's."""
    stored = archive.studies["table1"]
    rows = []
    for task, papers in stored.plan.study.seeds.items():
        own = [len(runs) for runs in stored.groups.get(task, {}).values()]
        counts = dict.fromkeys((min(own), max(own))) if own else [NOTHING]
        rows.append([task_name(task), " to ".join(map(str, counts)), str(papers)])
    return table(["Table 1", "our seeds", "the paper's"], rows)


def arithmetic(archive: Archive) -> str:
    """Return the precisions of the runs, with their numbers."""
    precisions = sorted(arithmetic_of(Experiment.of(run.spec)) for run in archive.runs)
    if not precisions:
        return "Nothing has been run yet."
    return bullets(
        [f"{name}: {count(precisions.count(name), 'run')}" for name in dict.fromkeys(precisions)]
    )


def missing(archive: Archive) -> str:
    """Return what has not been run, study by study."""
    lines = [f"`table1`, mode {RELEASED}: {line}" for line in _missing_released_seeds(archive)]
    for name, stored in archive.studies.items():
        plan = stored.plan
        absent = [task_name(task) for task in plan.study.tasks if task not in plan.tasks]
        parts = [f"no runs on {', '.join(absent)}"] if absent else []
        parts += [with_task_name(line) for line in plan.shrunk if line.endswith(" not run")]
        for task, series in stored.groups.items():
            parts += _missing_seeds(task, series, _seeds_of(series))
        if parts:
            lines.append(f"`{name}`: {'; '.join(parts)}")
    return bullets(lines) or "Nothing: every study has runs on every one of its tasks."


def _missing_released_seeds(archive: Archive) -> list[str]:
    """List seeds that a series has in mode paper and not in mode authors-code."""
    paper, released = archive.studies["table1"].groups, archive.released["table1"].groups
    lines = []
    for task, series in released.items():
        same = {name: runs for name, runs in paper.get(task, {}).items() if name in series}
        lines += _missing_seeds(task, series, _seeds_of(same))
    return lines


def _missing_seeds(task: str, series: Series, wanted: set[int]) -> list[str]:
    lines = []
    for name, runs in series.items():
        if lacks := sorted(wanted - {run.seed for run in runs}):
            which = " and ".join(f"seed {seed}" for seed in lacks)
            lines.append(f"{task_name(task)}: {algorithm_name(name)} without {which}")
    return lines


def _seeds_of(series: Series) -> set[int]:
    return {run.seed for runs in series.values() for run in runs}
