"""What may set our runs apart from the paper's: eps, writers, seeds, arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedexp.reproduce.measures import final, rounds_to_target
from fedexp.reproduce.published import NOTHING, quantity, target, text_of
from fedexp.reproduce.study import ALL_WRITERS, arithmetic_of
from fedexp.runs import spec_from
from fedexp.runs.spec import Outcome
from tools.results.gather import RELEASED, Results
from tools.results.words import bullets, plural, table, task_name

Runs = Sequence[Outcome]


def eps_modes(results: Results) -> str:
    """FedExP with the paper's eps and with the released code's, wherever both were run."""
    paper, other = results.studies["table1"].groups, results.released["table1"].groups
    both = [t for t in paper if "fedexp" in paper[t] and "fedexp" in other.get(t, {})]
    if not both:
        return "FedExP has not been run in both modes on the same task yet."
    rounds = results.studies["table1"].plan.rounds
    rows = [
        _mode_cells(task, mode, groups[task]["fedexp"], rounds)
        for task in both
        for mode, groups in (("paper", paper), (RELEASED, other))
    ]
    headers = ["task", "mode", "rounds to target", "paper", "final test accuracy"]
    headers += ["median server step", "largest", "median share of eps"]
    return table(headers, rows, words=2)


def _mode_cells(task: str, mode: str, runs: Runs, rounds: int) -> list[str]:
    steps, shares = (_all(runs, name) for name in ("server_lr", "eps_share"))
    return [
        task_name(task),
        mode,
        text_of(rounds_to_target(runs, target(task), rounds), "rounds"),
        text_of(quantity("table1-rounds").find(task, "fedexp"), "rounds"),
        text_of(final(runs, "test_accuracy"), "%"),
        f"{np.median(steps):.2f}",
        f"{steps.max():.2f}",
        f"{100 * np.median(shares):.1f}%" if shares.size else NOTHING,
    ]


def _all(runs: Runs, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = np.concatenate([run.curve(name) for run in runs])
    return values[~np.isnan(values)]


def writers(results: Results) -> str:
    """How many of EMNIST's writers the runs had."""
    found = {run.spec["clients"] for run in results.runs if run.spec["task"] == "emnist"}
    if not found:
        return "No run has used EMNIST yet."
    numbers = " or ".join(f"{number:,}" for number in sorted(found))
    return f"The runs have {numbers} of the {ALL_WRITERS:,} writers of federated EMNIST."


def seeds(results: Results) -> str:
    """Seeds of Table 1, ours and the paper's."""
    studied = results.studies["table1"]
    rows = []
    for task, papers in studied.plan.study.seeds.items():
        own = {name: len(runs) for name, runs in studied.groups.get(task, {}).items()}
        counts = dict.fromkeys((min(own.values()), max(own.values()))) if own else [NOTHING]
        rows.append([task_name(task), " to ".join(map(str, counts)), str(papers)])
    return table(["Table 1", "our seeds", "the paper's"], rows)


def arithmetic(results: Results) -> str:
    """In which precision the models were computed."""
    kinds: dict[str, int] = {}
    for run in results.runs:
        name = arithmetic_of(spec_from(run.spec))
        kinds[name] = kinds.get(name, 0) + 1
    if not kinds:
        return "Nothing has been run yet."
    return bullets([f"{name}: {plural(number, 'run')}" for name, number in sorted(kinds.items())])
