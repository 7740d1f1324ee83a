"""Table 1 of the paper and ours, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedexp.reproduce.accuracy_studies import TABLE1_ALGORITHMS as ALGORITHMS
from fedexp.reproduce.measures import final, final_loss, ratio, rounds_to_target
from fedexp.reproduce.published import NOTHING, Value, difference, quantity, target, text_of
from fedexp.runs.spec import Outcome
from tools.results.gather import RELEASED, Results, Studied
from tools.results.words import (
    algorithm_name,
    bullets,
    hits,
    paragraphs,
    percent,
    table,
    task_name,
)

Runs = Sequence[Outcome]


@dataclass(frozen=True)
class Row:
    """An algorithm on a task: ours and the paper's."""

    name: str
    runs: Runs
    rounds: Value
    speedup: Value | None
    paper_rounds: Value | None
    paper_speedup: Value | None


def table1(results: Results) -> str:
    """A table a task, with the paper's figures beside ours."""
    studied, tasks = results.studies["table1"], results.studies["table1"].plan.study.tasks
    parts = [_task_section(results, studied, task) for task in tasks]
    figure = f"![{studied.plan.study.title}](../results/table1/figure.svg)"
    return paragraphs(*parts, figure if studied.findings else "")


def _task_section(results: Results, studied: Studied, task: str) -> str:
    heading = f"### {task_name(task)}: {percent(target(task))} test accuracy"
    rows = rows_of(results, task)
    if not rows:
        return paragraphs(heading, "No runs yet.")
    whole = task not in studied.plan.partial
    told = bullets(shrunk_of(studied, task))
    return paragraphs(heading, side_by_side(rows, task, whole), told)


def shrunk_of(studied: Studied, task: str) -> list[str]:
    """How the runs of one task are less than the paper's."""
    own = (f"{task}: ", "EMNIST ") if task == "emnist" else (f"{task}: ",)
    return [line.removeprefix(own[0]) for line in studied.plan.shrunk if line.startswith(own)]


def side_by_side(rows: Sequence[Row], task: str, whole: bool) -> str:
    """Rounds, speed-up over FedAvg and how the runs end; the paper prints nothing of the end.

    Differences are given where the data are whole.
    """
    headers = [
        "algorithm",
        f"rounds to {percent(target(task))}",
        "each seed",
        "paper",
        "difference",
        "speed-up over FedAvg",
        "paper",
        "final test accuracy",
        "final training loss",
        "seeds",
    ]
    return table(headers, [_cells(row, target(task), whole) for row in rows])


def _cells(row: Row, goal: float, whole: bool) -> list[str]:
    return [
        row.name,
        text_of(row.rounds, "rounds"),
        hits(row.runs, goal),
        text_of(row.paper_rounds, "rounds"),
        _difference(row.rounds, row.paper_rounds) if whole else NOTHING,
        text_of(row.speedup, "times"),
        text_of(row.paper_speedup, "times"),
        text_of(final(row.runs, "test_accuracy"), "%"),
        text_of(final_loss(row.runs), ""),
        str(len(row.runs)),
    ]


def _difference(ours: Value, theirs: Value | None) -> str:
    """Ours less the paper's, in percent of the paper's.

    >>> _difference(Value(237.5), Value(267.0)), _difference(Value(500.0, more=True), Value(429.0))
    ('-11 %', '-')
    """
    gap = difference(ours, theirs)
    return NOTHING if gap is None or not theirs else f"{100 * gap / (theirs.mean or 1.0):+.0f} %"


def rows_of(results: Results, task: str) -> list[Row]:
    """The algorithms that were run on a task; FedExP as the released code has it comes last."""
    studied = results.studies["table1"]
    series = dict(studied.groups.get(task, {}))
    other = results.released["table1"].groups.get(task, {})
    rounds = studied.plan.rounds
    needed = {n: rounds_to_target(runs, target(task), rounds) for n, runs in series.items()}
    rows = [_row(task, name, series[name], needed) for name in ALGORITHMS if name in series]
    released = {n: rounds_to_target(runs, target(task), rounds) for n, runs in other.items()}
    for name, value in released.items():
        label = f"{algorithm_name(name)}, mode {RELEASED}"
        factor = _over(released.get("fedavg"), value)  # of the same mode
        rows.append(Row(label, other[name], value, factor, None, None))
    return rows


def _row(task: str, name: str, runs: Runs, needed: Mapping[str, Value]) -> Row:
    """The speed-up that the paper prints is FedExP's; the others' follow from its rounds."""
    printed, fedavg = quantity("table1-rounds"), needed.get("fedavg")
    theirs = printed.find(task, name)
    paper = _over(printed.find(task, "fedavg"), theirs)
    if name == "fedexp":
        paper = quantity("table1-ratio").find(task, "fedavg")
    return Row(algorithm_name(name), runs, needed[name], _over(fedavg, needed[name]), theirs, paper)


def _over(fedavg: Value | None, own: Value | None) -> Value | None:
    return ratio(fedavg, own) if fedavg and own else None
