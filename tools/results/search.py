"""Records of searches for step sizes and eps, and the EMNIST runs with the values that one found.

A record is a CSV file with one line per trial of `fedexp tune`; the name of an algorithm has its
reading of eps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedexp.analysis.summary import WINDOW
from fedexp.reproduce import STUDIES
from fedexp.reproduce.accuracy_studies import READINGS
from fedexp.reproduce.measures import final
from fedexp.reproduce.published import text_of
from fedexp.runs import StoredRun
from tools.grid import read_csv
from tools.results.archive import Archive
from tools.results.format import NO_RUNS, algorithm_name, table
from tools.results.table1 import interval, over, rounds_of

SEARCH = "search.csv"
LOCAL_LR = "local.lr"


class Trial(NamedTuple):
    """A point of the search; the score of one that diverged is 0.

    Attributes:
        algorithm: its name.
        local_lr: the client step size.
        option: the server's option.
        value: its value.
        score: training accuracy, averaged over the last 10 of 50 rounds.
    """

    algorithm: str
    local_lr: float
    option: str
    value: float
    score: float


def load_search(folder: Path) -> list[Trial]:
    """Return the trials of the search in their order; none if there was no search."""
    return [
        Trial(
            row["algorithm"],
            float(row["local_lr"]),
            row["option"],
            float(row["value"]),
            float(row["train_accuracy"]),
        )
        for row in read_csv(folder / SEARCH)
    ]


def best_trials(trials: list[Trial]) -> dict[str, Trial]:
    """Return the trial with the highest score of each algorithm."""
    best: dict[str, Trial] = {}
    for trial in trials:
        if trial.algorithm not in best or trial.score > best[trial.algorithm].score:
            best[trial.algorithm] = trial
    return best


def search_table(folder: Path) -> str:
    """Return the scores of all trials, the best of each algorithm in bold."""
    trials = load_search(folder)
    if not trials:
        return NO_RUNS
    best, rows = best_trials(trials), []
    steps = sorted({trial.local_lr for trial in trials})
    for name in best:
        own = [trial for trial in trials if trial.algorithm == name]
        for value in sorted({trial.value for trial in own}):
            scores = {t.local_lr: _score(t, best[name]) for t in own if t.value == value}
            cells = [scores.get(step, "") for step in steps]
            rows.append([algorithm_name(name), f"{own[0].option}={value:.3g}", *cells])
    headers = ["algorithm", "server", *(f"client step {step:.3g}" for step in steps)]
    return table(headers, rows, left=2)


def _score(trial: Trial, best: Trial) -> str:
    text = f"{100 * trial.score:.1f} %" if trial.score else "diverged"
    return f"**{text}**" if trial == best else text


def tuned_runs(
    archive: Archive, trials: Sequence[Trial]
) -> Iterator[tuple[Trial, list[StoredRun]]]:
    """Yield the best trial of each algorithm with its EMNIST runs, which are as long as Table 1's.

    Runs of the paper's values belong here as well, where the search found the same ones.
    """
    for best in best_trials(list(trials)).values():
        runs = {int(run.spec["seed"]): run for run in archive.runs if _is_tuned(run, best)}
        yield best, [runs[seed] for seed in sorted(runs)]  # two ids of one run are possible


def _is_tuned(run: StoredRun, best: Trial) -> bool:
    """Return whether a run has the values of a trial, and all others at the task's own."""
    spec, study = run.spec, STUDIES["table1"]
    algorithm, fixed = _algorithm(best)
    return (
        (spec["task"], spec["algorithm"], spec["mode"]) == ("emnist", algorithm, "paper")
        and (spec["rounds"], spec["evaluate_every"]) == (study.rounds, study.evaluate_every)
        and set(spec.get("changed", spec["set"])) <= {LOCAL_LR, best.option, *fixed}
        and all(str(spec["options"].get(name)) == value for name, value in fixed.items())
        and math.isclose(spec["options"][LOCAL_LR], best.local_lr, rel_tol=1e-5)
        and math.isclose(spec["options"][best.option], best.value, rel_tol=1e-5)
    )


def _algorithm(trial: Trial) -> tuple[str, dict[str, str]]:
    """Return the algorithm of a trial and the options of its reading of eps."""
    name, _, reading = trial.algorithm.removesuffix(")").partition(" (")
    return name, dict(READINGS[reading]) if reading else {}


def tuned_table(archive: Archive, folder: Path) -> str:
    """Return Table 1 of EMNIST with the values that the search found on the writers at hand."""
    tuned = list(tuned_runs(archive, load_search(folder)))
    outcomes = {best.algorithm: [run.outcome() for run in runs] for best, runs in tuned}
    rows, fedavg = [], outcomes.get("fedavg", [])
    for best, _ in tuned:
        values = f"client step {best.local_lr:.3g}, {best.option}={best.value:.3g}"
        runs, cells = outcomes[best.algorithm], [""] * 4
        if runs:
            first = rounds_of("emnist", runs)
            cells = [
                text_of(first, "rounds"),
                text_of(rounds_of("emnist", runs, WINDOW), "rounds"),
                text_of(over(rounds_of("emnist", fedavg), first), "times")
                + interval("emnist", fedavg, runs),
                text_of(final(runs, "test_accuracy"), "%"),
            ]
        rows.append([algorithm_name(best.algorithm), values, *cells, str(len(runs))])
    headers = ["algorithm", "tuned values", "rounds to target", "smoothed", "speed-up over FedAvg"]
    headers += ["final test accuracy", "seeds"]
    return table(headers, rows, left=2) if rows else NO_RUNS
