"""One section per study: its table next to the paper's, its figure, and the paper's claims."""

from __future__ import annotations

import numpy as np

from fedexp.analysis.summary import LEAST_SEEDS, mean_interval
from fedexp.reproduce.accuracy_studies import FINAL, LOSS, ROUNDS
from fedexp.reproduce.figure1 import CLIENT, SERVER, cell
from fedexp.reproduce.measures import (
    final,
    final_loss,
    on_common_seeds,
    rounds_to_target,
    seeds_of,
)
from fedexp.reproduce.published import Table, Value, claim, claims, quantity, target, text_of
from fedexp.reproduce.study import Check
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
HEADINGS = {  # by whether it is significant, and whether the criterion is met
    (True, True): "Agrees with the paper, significantly",
    (True, False): "Does not agree with the paper, significantly",
    (False, True): "Meets its criterion, without significance",
    (False, False): "Does not meet its criterion, without significance",
    (False, None): "Undecided by these runs",
}
# Claims about a number of their subject and the best of the others.
PAIRED = {
    "table1": ("fastest", "speedup", "margin", "loss", "scaffold"),
    "scaffold-exp": ("best",),
    "momentum": ("best",),
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
        (task, name): {run.seed: run for run in runs}
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
    parts, groups = list[str](), {kind: list[str]() for kind in HEADINGS}
    for name, check in _checks(archive):
        groups[is_significant(archive, name, check), check.holds].append(f"{name}: {_line(check)}")
    for kind, heading in HEADINGS.items():
        lines = groups[kind]
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
    """Return how many judgements are significant, and the claims that do not hold."""
    checks = _checks(archive)
    if not checks:
        return NO_RUNS
    enough = [(n, c) for n, c in checks if c.seeds is not None and c.seeds >= LEAST_SEEDS]
    significant = [check.holds for name, check in enough if is_significant(archive, name, check)]
    close = [(n, c) for n, c in enough if c.holds is False and not is_significant(archive, n, c)]
    head = (
        f"{len(enough)} of {len(checks)} judgements, each reading of eps by itself, are over five "
        f"seeds or more. Of these {len(significant)} are significant (t test, paired over seeds, "
        f"two-sided, 5 %): {significant.count(True)} agree with the paper and "
        f"{significant.count(False)} do not. All criteria that are not met:"
    )
    rest = [
        _sentence(check) + (" It is not significant." if (name, check) in close else "")
        for name, check in checks
        if check.holds is not True
    ]
    return paragraphs(head, bullets(rest) or "None.")


def is_significant(archive: Archive, study: str, check: Check) -> bool:
    """Return whether the subject of a claim and the best of the others differ in a paired t test.

    Rounds and losses are compared by the factor of the claim, accuracies by its points. Fewer than
    five seeds are not tested, nor claims that do not compare the subject with the best.
    """
    stored, names = archive.studies[study], check.series
    if check.holds is None or check.claim not in [claim(study, k) for k in PAIRED.get(study, ())]:
        return False
    runs = stored.groups[check.task]
    common = on_common_seeds({name: runs[name] for name in names if name in runs})
    if names[0] not in common or seeds_of(common) < LEAST_SEEDS:
        return False
    measure = {
        ROUNDS: lambda own: rounds_to_target(own, target(check.task), stored.plan.rounds),
        FINAL: lambda own: final(own, "test_accuracy"),
        LOSS: final_loss,
    }[check.column]
    numbers = {
        name: np.array([measure([r]).mean for r in sorted(own, key=lambda r: r.seed)])
        for name, own in common.items()
    }
    sign = 1 if check.column == FINAL else -1
    rival = max(numbers.keys() - {names[0]}, key=lambda name: sign * numbers[name].mean())
    points = check.claim.threshold if sign > 0 else 0.0
    factor = 1.0 if sign > 0 else check.claim.threshold or 1.0
    low, high = mean_interval(numbers[rival] - factor * numbers[names[0]] + points)
    return not low <= 0 <= high


def _sentence(check: Check) -> str:
    """Return where a claim does not hold, the claim, and what was seen instead."""
    about = ", ".join(filter(None, (task_name(check.task), check.reading)))
    verdict = "does not hold" if check.holds is False else "is undecided"
    statement = f"*{check.claim.text}* ({check.claim.place})"
    start = f"**{about}:** " if about else ""
    return f"{start}{statement} {verdict}{check.over}: {algorithm_names(check.seen)}."


def criteria(archive: Archive) -> str:
    """Return the criterion of every claim."""
    rows = [
        [name, each.text, each.place, each.criterion] for name in NAMES for each in claims(name)
    ]
    return table(["study", "claim", "in the paper", "holds if"], rows, left=4)


def _line(check: Check) -> str:
    """Return the claim, its place, the verdict with its seeds, and what was seen."""
    about = ", ".join(filter(None, (task_name(check.task), check.reading)))
    about += ": " if about else ""
    verdict = f"**{check.verdict}**{check.over} ({check.seen})"
    return f"{about}{check.claim.text} ({check.claim.place}): {verdict}"
