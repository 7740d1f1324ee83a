"""The result in a few lines and a figure: the document's first section, and README's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedexp.reproduce.output import study_figure
from fedexp.reproduce.published import Value, target, text_of
from tools.results.gather import Results
from tools.results.side_by_side import Row, rows_of
from tools.results.words import bullets, paragraphs, percent, plural, table, task_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "headline.svg"


def headline(results: Results) -> str:
    """A line a task: FedExP against FedAvg, ours and the paper's."""
    pairs = _pairs(results)
    lines = [_sentence(results, task, *pair) for task, pair in pairs.items()]
    tasks = results.studies["table1"].plan.study.tasks
    missing = [task_name(task) for task in tasks if task not in pairs]
    rest = f"Not run yet: {', '.join(missing)}." if missing else ""
    return paragraphs(bullets(lines), rest)


def readme(results: Results) -> str:
    """The headline as a table, and the curves behind it."""
    pairs = _pairs(results)
    if not pairs:
        return "The paper's table has not been run on real data yet."
    headers = ["rounds to", "FedAvg", "FedExP", "speed-up", "the paper's", "seeds"]
    rows = [_cells(task, *pair) for task, pair in pairs.items()]
    said = "Test accuracy by round on real data; bands are one standard deviation over seeds."
    notes = [_partial(results, task) for task in pairs if _partial(results, task)]
    figure = f"![{said}](results/{FIGURE})"
    more = "Every run, and what agrees with the paper and what does not: "
    link = "[docs/reproduction.md](docs/reproduction.md)."
    return paragraphs(table(headers, rows), figure, " ".join([*notes, more + link]))


def headline_figure(results: Results) -> Figure | None:
    """Test accuracy by round, a panel a task; None where nothing was run."""
    pairs, groups = _pairs(results), results.studies["table1"].groups
    if not pairs:
        return None
    shown = {task_name(task): groups[task] for task in pairs}
    targets = {task_name(task): target(task) for task in pairs}
    title = "Test accuracy by round; dotted: the paper's target"
    return study_figure(shown, title, ("test_accuracy",), targets=targets)


def _pairs(results: Results) -> dict[str, tuple[Row, Row]]:
    """FedExP and FedAvg on every task that has both."""
    found = {}
    for task in results.studies["table1"].plan.study.tasks:
        rows = {row.name: row for row in rows_of(results, task)}
        if {"FedExP", "FedAvg"} <= rows.keys():
            found[task] = rows["FedExP"], rows["FedAvg"]
    return found


def _sentence(results: Results, task: str, ours: Row, theirs: Row) -> str:
    said = f"**{task_name(task)}**, {percent(target(task))} test accuracy, {_seeds(ours, theirs)}: "
    said += f"FedExP {_reached(ours)}, FedAvg {_reached(theirs)}"
    if ours.speedup:
        said += f", which is **{_times(ours)} times** as many"
    paper = " and ".join(text_of(row.paper_rounds, "rounds") for row in (ours, theirs))
    factor = text_of(ours.paper_speedup, "times").removesuffix("x")
    return f"{said}. The paper: {paper}, {factor} times. {_partial(results, task)}".strip()


def _cells(task: str, ours: Row, theirs: Row) -> list[str]:
    return [
        f"{percent(target(task))} on {task_name(task)}",
        text_of(theirs.rounds, "rounds"),
        text_of(ours.rounds, "rounds"),
        text_of(ours.speedup, "times"),
        text_of(ours.paper_speedup, "times"),
        _seeds(ours, theirs).removesuffix("s").removesuffix(" seed"),
    ]


def _times(row: Row) -> str:
    return text_of(row.speedup, "times").removesuffix("x")


def _reached(row: Row) -> str:
    """`265 rounds`, or how many seeds got there."""
    if not row.rounds.more:
        return f"{text_of(Value(row.rounds.mean), 'rounds')} rounds"
    remark = f" ({row.rounds.remark} got there)" if row.rounds.remark else ""
    return f"more than {row.rounds.mean:g} rounds{remark}"


def _seeds(*rows: Row) -> str:
    numbers = sorted({len(row.runs) for row in rows})
    if len(numbers) == 1:
        return plural(numbers[0], "seed")
    return f"{numbers[0]} or {numbers[-1]} seeds"


def _partial(results: Results, task: str) -> str:
    """A caution where the data are not all there."""
    plan = results.studies["table1"].plan
    lines = [f"{line}." for line in plan.shrunk if line.startswith("EMNIST has")]
    return " ".join(lines) if task in plan.partial else ""
