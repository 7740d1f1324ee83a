"""One section per study: its table next to the paper's, its figure, and the paper's claims."""

from __future__ import annotations

from collections import Counter

from fedexp.reproduce.accuracy_studies import FINAL
from fedexp.reproduce.figure1 import CLIENT, SERVER, cell
from fedexp.reproduce.measures import final
from fedexp.reproduce.published import Table, Value, claims, quantity, text_of
from fedexp.reproduce.study import Check, count
from tools.results.archive import NAMES, Archive, StoredStudy
from tools.results.format import (
    NO_RUNS,
    algorithm_name,
    algorithm_names,
    bullets,
    paragraphs,
    table,
    task_name,
    with_task_name,
)

FIGURE = "figure.svg"
HEADINGS = {
    True: "Agrees with the paper",
    False: "Does not agree with the paper",
    None: "Undecided by these runs",
}


def section(archive: Archive, name: str) -> str:
    """Return what is missing, table, figure and claims of one study."""
    stored = archive.studies[name]
    if stored.findings is None:
        return NO_RUNS
    plan, findings = stored.plan, stored.findings
    shrunk = "; ".join(map(with_task_name, plan.shrunk))
    return paragraphs(
        f"Less than the paper's: {shrunk}." if shrunk else "",
        grid(findings.table) if name == "figure1" else _table(stored, findings.table),
        each_seed(stored),
        bullets([f"*{line}*" for line in plan.study.remarks]),
        f"![{plan.study.title}](../results/{name}/{FIGURE})",
        "Claims of the paper:",
        bullets([_line(check) for check in findings.checks]),
    )


def _table(stored: StoredStudy, own: Table) -> str:
    cells = own.cells(stored.plan.comparable, stored.plan.partial)
    rows = [[task_name(task), algorithm_name(series), *more] for task, series, *more in cells]
    return table(own.headers(), rows, left=2)


def grid(own: Table) -> str:
    """Return Figure 1 as in the paper: one row per server step size, one column per client's."""
    column = own.columns[0]
    theirs = quantity(column.published or "").values["emnist"]
    cells = {
        line.series: _pair(line.values[column.name], theirs[line.series]) for line in own.lines
    }
    rows = [[s, *(cells[cell(s, client)] for client in CLIENT)] for s in reversed(SERVER)]
    head = table(["server step, client step", *CLIENT], rows)
    return paragraphs(head, f"In brackets the paper's ({column.unit}).")


def _pair(ours: Value, theirs: Value) -> str:
    own = ours.remark if ours.mean is None else f"{ours.mean:.1f}"
    return f"{own} ({theirs.mean:g})"


def each_seed(stored: StoredStudy) -> str:
    """Return final accuracies, one column per seed, for tasks with several seeds."""
    columns = stored.findings.table.columns if stored.findings else ()
    groups = stored.groups if FINAL in (column.name for column in columns) else {}
    several = {
        (task, name): {run.spec.seed: run for run in runs}
        for task, series in groups.items()
        for name, runs in series.items()
        if max(map(len, series.values())) > 1
    }
    seeds = sorted({seed for own in several.values() for seed in own})
    rows = [
        [
            task_name(task),
            algorithm_name(name),
            *(text_of(final([own[s]], "test_accuracy"), "%") if s in own else "" for s in seeds),
        ]
        for (task, name), own in several.items()
    ]
    headers = ["final test accuracy", "", *(f"seed {seed}" for seed in seeds)]
    return table(headers, rows, left=2) if rows else ""


def verdicts(archive: Archive) -> str:
    """Return every claim of the paper that was checked, grouped by verdict."""
    checks, parts = _checks(archive), []
    for holds, heading in HEADINGS.items():
        lines = [f"{name}: {_line(check)}" for name, check in checks if check.holds is holds]
        parts += [f"**{heading}** ({len(lines)})", bullets(lines) or "Nothing."]
    return paragraphs(*parts)


def _checks(archive: Archive) -> list[tuple[str, Check]]:
    """Return the name of each study with its checks."""
    return [
        (name, check)
        for name, stored in archive.studies.items()
        for check in (stored.findings.checks if stored.findings else ())
    ]


def disagreements(archive: Archive) -> str:
    """Return how many claims were judged, and those that do not hold or are not decided."""
    checks = _checks(archive)
    if not checks:
        return NO_RUNS
    agree = sum(check.holds is True for _, check in checks)
    seeds = Counter(check.seeds for _, check in checks if check.seeds is not None)
    over = ", ".join(f"{n} on {count(k, 'seed')}" for k, n in sorted(seeds.items()))
    head = (
        f"{agree} of {len(checks)} judgements agree with the paper, each reading of eps counted by "
        f"itself; {over}. The others:"
    )
    rest = [_sentence(check) for _, check in checks if check.holds is not True]
    return paragraphs(head, bullets(rest) or "None.")


def _sentence(check: Check) -> str:
    """Return where a claim does not hold, the claim, and what was seen instead."""
    about = ", ".join(filter(None, (task_name(check.task), check.reading)))
    verdict = "does not hold" if check.holds is False else "is undecided"
    claim = f"*{check.claim.text}* ({check.claim.place})"
    start = f"**{about}:** " if about else ""
    return f"{start}{claim} {verdict}{check.over}: {algorithm_names(check.seen)}."


def criteria(archive: Archive) -> str:
    """Return the criterion of every claim."""
    rows = [
        [name, claim.text, claim.place, claim.criterion] for name in NAMES for claim in claims(name)
    ]
    return table(["study", "claim", "in the paper", "holds if"], rows, left=4)


def _line(check: Check) -> str:
    """Return the claim, its place, the verdict with its seeds, and what was seen."""
    about = ", ".join(filter(None, (task_name(check.task), check.reading)))
    about += ": " if about else ""
    verdict = f"**{check.verdict}**{check.over} ({check.seen})"
    return f"{about}{check.claim.text} ({check.claim.place}): {verdict}"
