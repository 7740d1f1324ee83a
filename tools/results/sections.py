"""A section a study: its table beside the paper's, the figure, and claims with what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from fedexp.reproduce.figure1 import CLIENT, SERVER, cell
from fedexp.reproduce.from_runs import SUPERSEDED
from fedexp.reproduce.published import Table, Value, quantity
from fedexp.reproduce.study import Check
from tools.results.each_seed import each_seed
from tools.results.gather import RELEASED, Results, Studied
from tools.results.seeds import behind, released_behind
from tools.results.words import (
    algorithm_name,
    bullets,
    named,
    paragraphs,
    table,
    task_name,
)

FIGURE = "figure.svg"
NONE = "No runs yet."
NOT_THERE = (" not run", SUPERSEDED)
HEADINGS = {
    True: "Agrees with the paper",
    False: "Does not agree with the paper",
    None: "Cannot be told from these runs",
}


def section(results: Results, name: str) -> str:
    """Table, figure, claims and what is missing of one study."""
    studied = results.studies[name]
    if studied.findings is None:
        return NONE
    plan = studied.plan
    said = "What the paper says, and what was seen:"
    checks = bullets([_line(check) for check in studied.findings.checks])
    less = f"Less than the paper's: {'; '.join(map(named, plan.shrunk))}." if plan.shrunk else ""
    figure = f"![{plan.study.title}](../results/{name}/{FIGURE})"
    notes = bullets([f"*{line}*" for line in plan.study.remarks])
    return paragraphs(less, _table(studied), each_seed(studied), notes, figure, said, checks)


def _table(studied: Studied) -> str:
    assert studied.findings is not None
    own, plan = studied.findings.table, studied.plan
    if plan.study.name == "figure1":
        return grid(own)
    cells = own.cells(plan.comparable, plan.partial)
    rows = [[task_name(task), algorithm_name(series), *more] for task, series, *more in cells]
    return table(own.headers(), rows, words=2)


def grid(own: Table) -> str:
    """Figure 1 as the paper has it: a row a server step size, a column a client step size."""
    column = own.columns[0]
    theirs = quantity(column.published or "").values["emnist"]
    pairs = {
        line.series: _pair(line.values[column.name], theirs[line.series]) for line in own.lines
    }
    rows = [[s, *(pairs[cell(s, client)] for client in CLIENT)] for s in reversed(SERVER)]
    head = table(["server step, client step", *CLIENT], rows)
    return paragraphs(head, f"In brackets the paper's ({column.unit}).")


def _pair(ours: Value, theirs: Value) -> str:
    own = ours.remark if ours.mean is None else f"{ours.mean:.1f}"
    return f"{own} ({theirs.mean:g})"


def verdicts(results: Results) -> str:
    """Every claim of the paper that was checked, by what came out."""
    parts = []
    for holds, heading in HEADINGS.items():
        lines = [f"{name}: {_line(c)}" for name, c in _checks(results) if c.holds is holds]
        parts += [f"**{heading}** ({len(lines)})", bullets(lines) or "Nothing."]
    return paragraphs(*parts)


def _checks(results: Results) -> Iterator[tuple[str, Check]]:
    for name, studied in results.studies.items():
        for check in studied.findings.checks if studied.findings else ():
            yield name, check


def _line(check: Check) -> str:
    """The claim, the verdict and what was seen."""
    word = {True: "yes", False: "no", None: "cannot tell"}[check.holds]
    task = f"{task_name(check.task)}: " if check.task else ""
    return f"{task}{check.claim.text} ({check.claim.place}): **{word}** ({check.seen})"


def missing(results: Results) -> str:
    """What has not been run, study by study."""
    lines = [f"`table1`, mode {RELEASED}: {line}" for line in released_behind(results)]
    for name, studied in results.studies.items():
        absent = [task for task in studied.plan.study.tasks if task not in studied.plan.tasks]
        again = [line for line in studied.plan.left_out if line.endswith(SUPERSEDED)]
        absent = [
            task for task in absent if not any(line.startswith(f"{task} is") for line in again)
        ]
        parts = [f"no runs on {', '.join(map(task_name, absent))}"] if absent else []
        parts += again
        parts += [named(line) for line in studied.plan.shrunk if line.endswith(NOT_THERE)]
        parts += behind(studied)
        if parts:
            lines.append(f"`{name}`: {'; '.join(parts)}")
    return bullets(lines) or "Nothing: every study has runs on every one of its tasks."


def of(name: str) -> Callable[[Results], str]:
    """The section of a study, by its name."""
    return partial(section, name=name)
