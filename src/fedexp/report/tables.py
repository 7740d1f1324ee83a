"""The tables of a section: the comparison, the settings, the runs and their environments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedexp.experiments.compare import summarise
from fedexp.experiments.outcome import Outcome
from fedexp.experiments.tables import comparison_table, format_value, warning_lines
from fedexp.report.gather import Section, status, value_text
from fedexp.report.html import Markup, definitions, join, named, table, tag
from fedexp.report.settings import shared_and_apart
from fedexp.runs import StoredRun
from fedexp.runs.commands import rerun

NOTHING = "-"
# Of an environment: what differs from run to run, or is shown elsewhere.
PER_RUN = ("command", "started", "resumed", "metric", "target")


def comparison(section: Section, metric: str, target: float | None) -> Markup:
    """Rounds to the target, speed-up, final metric; runs that go on are not judged yet."""
    ended = [
        (series, replace(outcome, spec=replace(outcome.spec, algorithm=series.label)))
        for series in section.series
        for run, outcome in zip(series.runs, series.outcomes(), strict=True)
        if run.result is not None
    ]
    notices = tag("ul", *(tag("li", text) for text in _notices(section)), class_="notices")
    outcomes = [outcome for _, outcome in ended]
    if not outcomes:
        return join([tag("p", "No run has finished yet, so there is nothing to compare."), notices])
    asked = {series.label: series.runs[0].spec["rounds"] for series, _ in ended}
    lines = summarise(outcomes, metric, target)
    parts = [comparison_table([own], metric, target, asked[own.algorithm]) for own in lines]
    headers, cells = parts[0][0], [row for _, rows in parts for row in rows]
    labels = {series.label: named(series) for series, _ in ended}
    caption = "Mean and standard deviation over seeds"
    marked = [[labels.get(name, name), *others] for name, *others in cells]
    return join([table(caption, headers, marked), notices])


def _notices(section: Section) -> list[str]:
    outcomes: list[Outcome] = []
    lines = []
    for series in section.series:
        for run, outcome in zip(series.runs, series.outcomes(), strict=True):
            outcomes.append(replace(outcome, spec=replace(outcome.spec, algorithm=series.label)))
            if run.result is None:
                where = f"{series.label} (seed {run.spec['seed']})"
                lines.append(f"{where} is {status(run)}; in the curves, not in the table")
    return warning_lines(outcomes) + lines


def common_settings(section: Section) -> Markup:
    """What all series share, once; then a table of what sets them apart."""
    shared, apart = shared_and_apart(section.series)
    parts: list[object] = [definitions((name, value_text(v)) for name, v in shared.items())]
    if apart:
        cells = [
            [named(series), *(value_text(series.settings.get(name, NOTHING)) for name in apart)]
            for series in section.series
        ]
        caption = "What differs; options at their algorithm's default are in the full specs"
        parts.append(table(caption, ["algorithm", *apart], cells))
    return join(parts)


def full_specs(section: Section) -> Markup:
    """The whole spec of each series, as its spec.toml has it."""
    return join(
        tag(
            "details",
            tag("summary", f"Full spec of {series.label}, seed {series.runs[0].spec['seed']}"),
            tag("pre", _as_toml(series.runs[0].spec), tabindex=0),
        )
        for series in section.series
    )


def run_list(section: Section, metric: str) -> Markup:
    """Every run, how it ended and how long it took."""
    cells = [
        [
            named(series),
            run.spec["seed"],
            status(run),
            len(run.rows),
            last_value(run, metric),
            duration(wall_time(run)),
            tag("code", run.folder.name),
        ]
        for series in section.series
        for run in series.runs
    ]
    value = f"last {metric.replace('_', ' ')}"
    headers = ["algorithm", "seed", "status", "rounds", value, "wall time", "folder"]
    return table("Every run, and how it ended", headers, cells, "figures runs")


def commands(section: Section) -> Markup:
    """One line a run that repeats it."""
    lines = "\n".join(rerun(run.spec) for run in section.runs)
    return tag("pre", tag("code", lines), tabindex=0, aria_label="Commands that repeat the runs")


def environments(runs: Sequence[StoredRun]) -> Markup:
    """The machines and versions, each said once, with the number of its runs."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        fixed = {k: v for k, v in run.environment.items() if k not in PER_RUN}
        groups.setdefault(json.dumps(fixed, sort_keys=True), []).append(run)
    parts = []
    for text, own in groups.items():
        seconds = sum(wall_time(run) or 0.0 for run in own)
        said = {"runs": len(own), "wall time": duration(seconds), **json.loads(text)}
        parts.append(definitions((name, value_text(value)) for name, value in said.items()))
    return join(parts)


def wall_time(run: StoredRun) -> float | None:
    """Seconds that the run took; without its evaluations where it has not ended."""
    if run.result is not None:
        return float(run.result["seconds"])
    return sum(row.get("seconds") or 0.0 for row in run.rows)


def last_value(run: StoredRun, metric: str) -> str:
    known = [row[metric] for row in run.rows if row.get(metric) is not None]
    return format_value(known[-1], metric) if known else NOTHING


def duration(seconds: float | None) -> str:
    """Seconds as people say them.

    >>> duration(4.25), duration(125), duration(7300)
    ('4.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _as_toml(spec: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(spec)
