"""Records of searches for step sizes and eps, and the EMNIST runs with the values that one found.

A record is a CSV file with one line per trial, written from the output of `fedexp tune --json` by

    python -m tools.results.search a.json "b.json=participants x eps" --to results/emnist-tuned

which then prints the commands that run the best values.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedexp.analysis.summary import WINDOW
from fedexp.errors import require
from fedexp.reproduce import STUDIES
from fedexp.reproduce.accuracy_studies import READINGS, of_reading
from fedexp.reproduce.measures import final, ratio, rounds_to_target
from fedexp.reproduce.published import target, text_of
from fedexp.runs import StoredRun
from tools.results.archive import Archive, load_archive
from tools.results.format import NO_RUNS, algorithm_name, table
from tools.results.runs import GPU, SEEDS
from tools.results.table1 import interval

SEARCH = "search.csv"
LOCAL_LR, SCORE = "local.lr", "train_accuracy"
COLUMNS = ("algorithm", "local_lr", "option", "value", SCORE)


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
    if not (folder / SEARCH).is_file():
        return []
    with (folder / SEARCH).open(encoding="utf-8", newline="") as file:
        return [
            Trial(
                row["algorithm"],
                float(row["local_lr"]),
                row["option"],
                float(row["value"]),
                float(row["train_accuracy"]),
            )
            for row in csv.DictReader(file)
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


def convert(found: dict[str, Any], reading: str = "") -> list[Trial]:
    """Return the trials of `fedexp tune --json`, over the client step size and one other option.

    Args:
        found: the output of the command.
        reading: the reading of eps that it was run with; empty for the printed one.
    """
    trials = []
    for own in found["algorithms"]:
        name = of_reading(own["algorithm"], reading)
        for each in own["trials"]:
            values = each["values"]
            (option,) = (key for key in values if key != LOCAL_LR)
            trials.append(
                Trial(name, values[LOCAL_LR], option, values[option], each["score"] or 0.0)
            )
    return trials


def store_search(folder: Path, trials: Sequence[Trial]) -> None:
    """Write the record of a search."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SEARCH).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*trial[:4], f"{trial.score:.6g}"] for trial in trials)


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


def tuned_commands(archive: Archive, trials: Sequence[Trial]) -> list[str]:
    """Return the commands that run the best values with the seeds that the archive lacks."""
    study, seeds, lines = STUDIES["table1"], SEEDS["emnist"], []
    for best, runs in tuned_runs(archive, trials):
        name, fixed = _algorithm(best)
        options = {LOCAL_LR: repr(best.local_lr), best.option: repr(best.value), **fixed}
        words = [f"--rounds {study.rounds} --evaluate-every {study.evaluate_every}"]
        words += [f"--{key} {value}" for key, value in GPU.items()]
        words += [f"--set {key}={value}" for key, value in options.items()]
        missing = sorted(set(range(seeds)) - {int(run.spec["seed"]) for run in runs})
        starts = [f"fedexp run emnist --algorithm {name} --seed {seed}" for seed in missing]
        if len(missing) == seeds:
            starts = [f"fedexp compare emnist --algorithms {name} --seeds {seeds}"]
        lines += [" ".join([start, *words]) for start in starts]
    return lines


def tuned_table(archive: Archive, folder: Path) -> str:
    """Return Table 1 of EMNIST with the values that the search found on the writers at hand."""
    rows, rounds, goal = [], STUDIES["table1"].rounds, target("emnist")
    found = list(tuned_runs(archive, load_search(folder)))
    outcomes = {best.algorithm: [run.outcome() for run in runs] for best, runs in found}
    first = {n: rounds_to_target(own, goal, rounds) for n, own in outcomes.items() if own}
    for best, runs in found:
        values = f"client step {best.local_lr:.3g}, {best.option}={best.value:.3g}"
        name, own = best.algorithm, outcomes[best.algorithm]
        cells = [""] * 4
        if own:
            times = ratio(first["fedavg"], first[name]) if "fedavg" in first else None
            cells = [
                text_of(first[name], "rounds"),
                text_of(rounds_to_target(own, goal, rounds, WINDOW), "rounds"),
                text_of(times, "times") + interval("emnist", outcomes.get("fedavg", ()), own),
                text_of(final(own, "test_accuracy"), "%"),
            ]
        rows.append([algorithm_name(name), values, *cells, str(len(runs))])
    headers = ["algorithm", "tuned values", "rounds to target", "smoothed", "speed-up over FedAvg"]
    headers += ["final test accuracy", "seeds"]
    return table(headers, rows, left=2) if rows else NO_RUNS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.results.search")
    parser.add_argument("found", nargs="+", metavar="FILE[=READING]", help="of fedexp tune --json")
    parser.add_argument("--to", type=Path, required=True, help="folder of the record")
    args = parser.parse_args()
    trials: list[Trial] = []
    for path, _, reading in (each.partition("=") for each in args.found):
        require(Path(path).is_file(), f"{path}: no such file; write it with fedexp tune --json")
        trials += convert(json.loads(Path(path).read_text(encoding="utf-8")), reading)
    store_search(args.to, trials)
    print(*tuned_commands(load_archive(args.to.parent), trials), sep="\n")


if __name__ == "__main__":
    main()
