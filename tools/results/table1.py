"""Table 1 of the paper next to ours: the tables per task, the headline, and other targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedexp.analysis.summary import WINDOW, rounds_to, smoothed, speedup_interval
from fedexp.analysis.tables import count
from fedexp.reproduce import STUDIES
from fedexp.reproduce.accuracy_studies import READINGS, of_reading
from fedexp.reproduce.measures import final, ratio, rounds_to_target
from fedexp.reproduce.output import study_figure
from fedexp.reproduce.published import NOTHING, Value, difference, quantity, target, text_of
from fedexp.runs.spec import Outcome
from tools.results.archive import RELEASED, Archive
from tools.results.format import (
    NO_RUNS,
    PRINTED,
    algorithm_name,
    algorithm_names,
    bullets,
    link,
    paragraphs,
    percent,
    table,
    task_name,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = "headline.svg"
FROM = {"emnist": 0.7}  # the accuracy at which the figure starts, where it is not the lowest
OTHER_TARGETS = (-20, -10, -5, 0, 2, 4)  # points above the target, the same for every task


@dataclass(frozen=True)
class Row:
    """An algorithm on a task: ours, where it was run, and the paper's."""

    series: str
    name: str
    runs: Sequence[Outcome] = ()
    rounds: Value | None = None
    smoothed: Value | None = None
    speedup: Value | None = None
    within: str = ""  # the interval of the speed-up
    smoothed_speedup: str = ""  # with its interval
    paper_rounds: Value | None = None
    paper_speedup: Value | None = None


def rows_of(archive: Archive, task: str) -> list[Row]:
    """Return all series of a task that has runs; those in mode authors-code come last."""
    study, released = archive.studies["table1"], archive.released["table1"]
    series, other = study.groups.get(task, {}), released.groups.get(task, {})
    arms = study.plan.arms(task) if series else []
    rows = [_row(task, arm.series, series) for arm in arms]
    for name in other:  # the paper's numbers are beside the first rows
        row = _row(task, name, other)
        label = f"{algorithm_name(name)}, mode {RELEASED}"
        rows.append(replace(row, name=label, paper_rounds=None, paper_speedup=None))
    return rows


def _row(task: str, name: str, series: Mapping[str, Sequence[Outcome]]) -> Row:
    """Return a row; its speed-up is over FedAvg of the same mode."""
    printed = quantity("table1-rounds")
    paper_rounds = printed.find(task, name)
    # The paper prints FedExP's speed-up; the others' follow from its rounds.
    paper_speedup = over(printed.find(task, "fedavg"), paper_rounds)
    if _is_fedexp(name):
        paper_speedup = quantity("table1-ratio").find(task, "fedavg")
    row = Row(name, series_name(name), paper_rounds=paper_rounds, paper_speedup=paper_speedup)
    if name not in series:
        return row
    runs, fedavg = series[name], series.get("fedavg", ())
    first, last = rounds_of(task, runs), rounds_of(task, runs, WINDOW)
    smoothed_speedup = over(rounds_of(task, fedavg, WINDOW), last)
    return replace(
        row,
        runs=runs,
        rounds=first,
        smoothed=last,
        speedup=over(rounds_of(task, fedavg), first),
        within=interval(task, fedavg, runs),
        smoothed_speedup=text_of(smoothed_speedup, "times") + interval(task, fedavg, runs, WINDOW),
    )


def interval(task: str, fedavg: Sequence[Outcome], runs: Sequence[Outcome], window: int = 1) -> str:
    """Return the 95 % interval of a speed-up, e.g. ` [1.54, 1.86]`; see `speedup_interval`.

    It is empty for fewer than five seeds, where one misses the target, and for FedAvg itself.
    """

    def by_seed(runs: Sequence[Outcome]) -> dict[int, int]:
        curves = {run.seed: smoothed(run.curve("test_accuracy"), window) for run in runs}
        hits = {seed: rounds_to(curve, target(task), True) for seed, curve in curves.items()}
        return {seed: rounds for seed, rounds in hits.items() if rounds is not None}

    slow, fast = by_seed(fedavg), by_seed(runs)
    if fedavg is runs or len(slow) < len(fedavg) or len(fast) < len(runs):
        return ""
    within = speedup_interval(slow, fast)
    return "" if within is None else f" [{within[0]:.2f}, {within[1]:.2f}]"


def series_name(series: str) -> str:
    """Return the name of a series; FedExP's states its reading of eps."""
    return f"FedExP ({reading_of(series)})" if _is_fedexp(series) else algorithm_name(series)


def reading_of(series: str) -> str:
    """Return the reading of eps of a series of FedExP.

    >>> reading_of("fedexp"), reading_of("fedexp (participants x eps)")
    ('eps as printed', 'participants x eps')
    """
    return next((name for name in READINGS if of_reading("fedexp", name) == series), PRINTED)


def _is_fedexp(series: str) -> bool:
    return series in [of_reading("fedexp", reading) for reading in ("", *READINGS)]


def rounds_of(task: str, runs: Sequence[Outcome], window: int = 1) -> Value | None:
    """Return the mean rounds of some runs to Table 1's target; None without runs."""
    rounds = STUDIES["table1"].rounds
    return rounds_to_target(runs, target(task), rounds, window) if runs else None


def over(fedavg: Value | None, other: Value | None) -> Value | None:
    """Return the speed-up over FedAvg; None where one of them has no rounds."""
    return ratio(fedavg, other) if fedavg and other else None


def tables(archive: Archive) -> str:
    """Return one table per task, with what differs from the paper's runs."""
    study = archive.studies["table1"]
    parts = []
    for task in study.plan.study.tasks:
        parts.append(f"### {task_name(task)}: {percent(target(task))} test accuracy")
        rows = rows_of(archive, task)
        prefixes = (f"{task}: ", "EMNIST ") if task == "emnist" else (f"{task}: ",)
        shrunk = [
            algorithm_names(line.removeprefix(prefixes[0]))
            for line in study.plan.shrunk
            if line.startswith(prefixes)
        ]
        comparable = task not in study.plan.partial
        parts.append(_table(rows, task, comparable) if rows else NO_RUNS)
        parts.append(f"Differences from the paper: {'; '.join(shrunk)}." if rows and shrunk else "")
    return paragraphs(*parts)


def _table(rows: Sequence[Row], task: str, comparable: bool) -> str:
    """Return rounds, speed-up over FedAvg and final accuracy, which the paper does not print."""
    headers = [
        "algorithm",
        f"rounds to {percent(target(task))}",
        "each seed",
        "smoothed",
        "paper",
        "difference",
        "speed-up",
        "paper",
        "final test accuracy",
    ]
    return table(headers, [_cells(row, task, comparable) for row in rows])


def _cells(row: Row, task: str, comparable: bool) -> list[str]:
    """Return the cells of a row; ours are empty where it was not run."""
    paper = text_of(row.paper_rounds, "rounds"), text_of(row.paper_speedup, "times")
    if row.rounds is None:
        return [row.name, "", "", "", paper[0], "", "", paper[1], ""]
    return [
        row.name,
        text_of(row.rounds, "rounds"),
        ", ".join(_first_round(run, target(task)) for run in row.runs),
        text_of(row.smoothed, "rounds"),
        paper[0],
        _relative(row.rounds, row.paper_rounds) if comparable else NOTHING,
        text_of(row.speedup, "times") + row.within,
        paper[1],
        text_of(final(row.runs, "test_accuracy"), "%"),
    ]


def _first_round(run: Outcome, goal: float) -> str:
    """Return the first round at the target."""
    hit = rounds_to(run.curve("test_accuracy"), goal, higher=True)
    if hit is not None:
        return str(hit)
    return "diverged" if run.diverged_at is not None else f">{len(run.rows)}"


def _relative(ours: Value, theirs: Value | None) -> str:
    """Return ours minus the paper's, in percent of the paper's.

    >>> _relative(Value(237.5), Value(267.0)), _relative(Value(500.0, more=True), Value(429.0))
    ('-11 %', '-')
    """
    gap = difference(ours, theirs)
    return NOTHING if gap is None or not theirs else f"{100 * gap / (theirs.mean or 1.0):+.0f} %"


def other_targets(archive: Archive) -> str:
    """Return one table per task of mean rounds to accuracies around the target."""
    parts = []
    for task, series in archive.studies["table1"].groups.items():
        goals = [target(task) + points / 100 for points in OTHER_TARGETS]
        rounds = STUDIES["table1"].rounds
        rows = [
            [
                series_name(name),
                *(text_of(rounds_to_target(runs, goal, rounds), "rounds") for goal in goals),
            ]
            for name, runs in series.items()
        ]
        parts.append(table([f"{task_name(task)}, rounds to", *map(percent, goals)], rows))
    return paragraphs(*parts) or NO_RUNS


def headline(archive: Archive) -> str:
    """Return one line per task and reading of eps: FedExP against FedAvg, ours and the paper's."""
    pairs = _pairs(archive)
    lines = [_sentence(task, *pair) for task, of_task in pairs.items() for pair in of_task]
    tasks = archive.studies["table1"].plan.study.tasks
    missing = [task_name(task) for task in tasks if task not in pairs]
    notes = [note for task in pairs if (note := _incomplete(archive, task))]
    rest = " ".join([*notes, f"Not run yet: {', '.join(missing)}."] if missing else notes)
    caption = "Test accuracy by round on real data; bands are one standard deviation over seeds."
    figure = f"![{caption}](../results/{FIGURE})" if pairs else ""
    return paragraphs(bullets(lines), rest, figure)


def readme(archive: Archive) -> str:
    """Return README's block: FedAvg's rounds, FedExP's and the speed-up, by both crossings."""
    pairs = _pairs(archive)
    if not pairs:
        return "The paper's table has not been run on real data yet."
    headers = ["target, eps", "first crossing", "paper", "smoothed"]
    rows = [
        [
            f"{task_name(task)} {percent(target(task))}, "
            f"{reading_of(fedexp.series).removeprefix('eps ')}, "
            f"{_seeds(fedexp, fedavg)}",
            f"{_mean(fedavg.rounds)}/{_mean(fedexp.rounds)}: "
            f"{text_of(fedexp.speedup, 'times')}{fedexp.within}",
            text_of(fedexp.paper_speedup, "times"),
            f"{_mean(fedavg.smoothed)}/{_mean(fedexp.smoothed)}: {fedexp.smoothed_speedup}",
        ]
        for task, of_task in pairs.items()
        for fedexp, fedavg in of_task
    ]
    notes = [note for task in pairs if (note := _incomplete(archive, task))]
    more = link("every claim of the paper", "docs/reproduction.md")
    return paragraphs(table(headers, rows), " ".join([*notes, f"More: {more}."]))


def _mean(value: Value | None) -> str:
    """Return rounds without their spread; with the seeds that reached the target, if not all did.

    >>> _mean(Value(487.5, more=True, remark="1/2 seeds")), _mean(Value(83.0, 2.7))
    ('>487.5 (1/2 seeds)', '83')
    """
    return text_of(value and replace(value, spread=None), "rounds")


def headline_figure(archive: Archive) -> Figure | None:
    """Draw test accuracy by round, one panel per task; None if nothing was run.

    One legend is below the panels. A vertical axis starts at `FROM` where the curves of a task
    differ by little beside their rise.
    """
    pairs, groups = _pairs(archive), archive.studies["table1"].groups
    if not pairs:
        return None
    shown = {task_name(task): groups[task] for task in pairs}
    targets = {task_name(task): target(task) for task in pairs}
    title = "Test accuracy by round; dotted: the paper's target"
    figure = study_figure(shown, title, ("test_accuracy",), targets=targets)
    for task, panel in zip(pairs, figure.axes, strict=True):
        panel.locator_params(axis="x", nbins=5)
        if task in FROM:
            panel.set_ylim(bottom=FROM[task])
        if (legend := panel.get_legend()) is not None:
            legend.remove()
    lines = {series_name(name): line for panel in figure.axes for line, name in _labelled(panel)}
    below = figure.legend(lines.values(), lines, loc="outside lower center", ncols=2, fontsize=11)
    below.set_frame_on(False)
    figure.set_size_inches(3.3 * len(pairs), 4.6)  # its fonts are then those of the page
    return figure


def _labelled(panel: Axes) -> Iterable[tuple[Artist, str]]:
    return zip(*panel.get_legend_handles_labels(), strict=True)


def _pairs(archive: Archive) -> dict[str, list[tuple[Row, Row]]]:
    """Return FedExP, in each reading of eps, and FedAvg on every task that has both."""
    found = {}
    for task in archive.studies["table1"].plan.study.tasks:
        rows = [row for row in rows_of(archive, task) if row.runs and RELEASED not in row.name]
        fedavg = next((row for row in rows if row.series == "fedavg"), None)
        fedexp = [row for row in rows if _is_fedexp(row.series)]
        if fedexp and fedavg:
            found[task] = [(row, fedavg) for row in fedexp]
    return found


def _sentence(task: str, fedexp: Row, fedavg: Row) -> str:
    goal = f"{percent(target(task))} test accuracy"
    ours = f"{fedexp.name} needs {_reached(fedexp)} and FedAvg {_reached(fedavg)}"
    if fedexp.speedup:
        ours += f": a speed-up of **{_times(fedexp.speedup)}**{fedexp.within}"
        ours += f", smoothed {fedexp.smoothed_speedup}"
    paper = " and ".join(text_of(row.paper_rounds, "rounds") for row in (fedexp, fedavg))
    return (
        f"**{task_name(task)}**, {goal}, {_seeds(fedexp, fedavg)}: {ours} "
        f"(the paper: {paper}, {_times(fedexp.paper_speedup)})."
    )


def _times(value: Value | None) -> str:
    return text_of(value, "times").removesuffix("x")


def _reached(row: Row) -> str:
    """Return `265 rounds`, or how many seeds reached the target."""
    if row.rounds is None:
        return "not run"
    if not row.rounds.more:
        return f"{text_of(Value(row.rounds.mean), 'rounds')} rounds"
    remark = f" ({row.rounds.remark} reached it)" if row.rounds.remark else ""
    return f"more than {row.rounds.mean:g} rounds{remark}"


def _seeds(*rows: Row) -> str:
    numbers = sorted({len(row.runs) for row in rows})
    if len(numbers) == 1:
        return count(numbers[0], "seed")
    return f"{numbers[0]} or {numbers[-1]} seeds"


def _incomplete(archive: Archive, task: str) -> str:
    """Return a caution if the data of a task are incomplete."""
    plan = archive.studies["table1"].plan
    lines = [f"{line}." for line in plan.shrunk if line.startswith("EMNIST has")]
    return " ".join(lines) if task in plan.partial else ""
