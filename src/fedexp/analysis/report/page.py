"""The page of `fedexp report`: one HTML file with tables, charts and plotly.js, without requests.

`render` fills the template page.html with one section per task: comparison, charts, settings, runs
and commands. The template escapes all text; the charts are drawn by page.js from embedded JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedexp import __version__
from fedexp.analysis import tables
from fedexp.analysis.plots import check_writable, metric_title
from fedexp.analysis.report import charts
from fedexp.analysis.report.filters import Filters
from fedexp.analysis.report.sections import (
    WINDOW,
    Section,
    Series,
    Targets,
    common_and_differing,
    distinct,
    effective_options,
    load_runs,
    status,
    value_text,
)
from fedexp.analysis.report.sections import sections as sections_of
from fedexp.analysis.summary import Line, summarise_groups
from fedexp.errors import UsageError, require
from fedexp.optional import extra
from fedexp.plain import flat
from fedexp.runs import StoredRun
from fedexp.runs.spec import Outcome
from fedexp.storage import write_bytes
from fedexp.tasks.recipe import parse_goal
from fedexp_command.rerun import rerun

NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """What `write_report` wrote.

    Attributes:
        page: the HTML file.
        figures: static figures, if they were wanted.
        runs: number of runs on the page.
        tasks: number of its sections.
        left_out: what filters removed; empty if nothing.
    """

    page: Path
    figures: list[Path]
    runs: int
    tasks: int
    left_out: str


def write_report(
    paths: Iterable[str | os.PathLike[str]],
    page: str | os.PathLike[str],
    *,
    metrics: Sequence[str] = (),
    targets: Targets | None = None,
    filters: Filters | None = None,
    figures: str | os.PathLike[str] | None = None,
    on_problem: Callable[[str], None] = lambda line: None,
) -> Report:
    """Write the runs in some folders as one page, and as figures.

    Args:
        paths: run folders, or folders of them.
        page: the HTML file.
        metrics: record fields to draw instead of the default ones; "max:test_f1" or "min:..." also
            judges by it.
        targets: values to reach; by default those of the tasks.
        filters: which runs to show.
        figures: folder for PNG, SVG and PDF.
        on_problem: called with a line for each run that is unreadable or a duplicate, each series
            of runs of different content, and each pattern that matches no run.
    """
    goals = [parse_goal(text) for text in metrics if ":" in text]
    wanted = [text.rpartition(":")[2] for text in metrics]
    loaded, problems = load_runs(map(Path, paths))
    for line in problems:
        on_problem(line)
    selection = (filters or Filters()).select(loaded)
    runs, repeated = distinct(selection.runs)
    for line in (*repeated, *(f"{text} matches no run" for text in selection.idle)):
        on_problem(line)
    sections = sections_of(runs, goals[0] if goals else None)
    targets = targets or Targets()
    charts.check_metrics(sections, wanted)
    targets.check(sections)
    if figures is not None:
        check_writable(Path(figures, "curves.png"), "--figures")
    write_page(Path(page), render(sections, wanted, targets, selection.left_out))
    drawn = [] if figures is None else charts.write_figures(sections, wanted, Path(figures))
    return Report(Path(page), drawn, len(runs), len(sections), selection.left_out)


def render(
    sections: Sequence[Section],
    wanted: Sequence[str],
    targets: Targets,
    left_out: str = "",
) -> str:
    """Return the page.

    Args:
        sections: in order.
        wanted: the metrics to draw; empty for the default ones.
        targets: the values to reach, by task.
        left_out: what filters removed.
    """
    jinja2 = extra("jinja2", "a report", group="report")
    plotly, script = plotly_source(), _file("page.js")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page: str = template.from_string(_file("page.html")).render(
        policy=_policy(plotly, script),
        style=_file("page.css"),
        title="FedExP report: " + ", ".join(dict.fromkeys(s.task for s in sections)),
        lead=_lead(sections, left_out),
        sections=[_section(section, wanted, targets) for section in sections],
        environments=environments([run for s in sections for run in s.runs]),
        dashes=charts.SVG_DASHES,
        window=WINDOW,
        version=__version__,
        data=_as_script([charts.section_payload(section, wanted, targets) for section in sections]),
        plotly=plotly,
        script=script,
    )
    return page


def write_page(path: Path, text: str) -> None:
    """Write the page atomically: after a failure the old file is intact."""
    require(not path.is_dir(), f"{path} is a folder; name a file, e.g. -o {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another -o") from None


def plotly_source() -> str:
    """Return plotly.js, from the Python package."""
    return str(extra("plotly.offline", "a report", "plotly", "report").get_plotlyjs())


def _file(name: str) -> str:
    return resources.files("fedexp.analysis.report").joinpath(name).read_text("utf-8")


def _policy(*scripts: str) -> str:
    """Return a content security policy that forbids all requests and all other scripts."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _as_script(payload: object) -> str:
    """Return JSON that cannot close its script element."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# Header and sections.


def _lead(sections: Sequence[Section], left_out: str) -> str:
    runs = [run for section in sections for run in section.runs]
    days = sorted({str(run.environment.get("started", ""))[:10] for run in runs} - {""})
    when = f", run {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    without = f" ({left_out})" if left_out else ""
    size = f"{tables.count(len(runs), 'run')} on {tables.count(len(sections), 'task')}"
    return f"{size}{when}{without}."


def _section(section: Section, wanted: Sequence[str], targets: Targets) -> dict[str, Any]:
    """Return what the template shows of a section."""
    metric = charts.main_metric(section, wanted)
    common, names = common_and_differing(section.series)
    settings = [
        (s, [value_text(s.settings.get(n, NOTHING)) for n in names]) for s in section.series
    ]
    return {
        "title": section.title,
        "summary": _summary(section),
        "series": section.series,
        "comparison": comparison(section, metric, targets.of(section, metric)),
        "goal": section.goal,
        "charts": [
            {"name": name, "title": metric_title(name), "text": charts.describe(section, name)}
            for name in charts.chart_names(section, wanted)
        ],
        "common": [(name, value_text(value)) for name, value in common.items()],
        "settings": (["algorithm", *names], settings) if names else None,
        "specs": full_specs(section),
        "runs": run_list(section, metric),
        "commands": "\n".join(rerun(run.spec) for run in section.runs),
    }


def _summary(section: Section) -> str:
    spec = section.runs[0].spec
    numbers = sorted({run.spec["rounds"] for run in section.runs})
    rounds = f"{numbers[0]} to {numbers[-1]} rounds"
    if len(numbers) == 1:
        rounds = tables.count(numbers[0], "round")
    seeds = max(len(series.runs) for series in section.series)
    return f"{rounds}, {_cohort(spec)}, {tables.count(seeds, 'seed')}"


def _cohort(spec: Mapping[str, Any]) -> str:
    """Return which clients train in a round.

    >>> _cohort({"cohort": 0.1, "clients": 50}), _cohort({"cohort": "nightly", "clients": 9})
    ('10% of 50 clients per round', 'clients of 9 by nightly')
    """
    if "clients" not in spec:
        return "clients on Flower"  # their number is not fixed
    chosen, clients = spec.get("cohort") or spec["clients"], spec["clients"]
    if isinstance(chosen, str):
        return f"clients of {clients} by {chosen}"
    size = f"{100 * chosen:g}%" if isinstance(chosen, float) else chosen
    size = len(chosen) if isinstance(chosen, list) else size
    return f"{size} of {clients} clients per round"


# Tables of a section.


def comparison(section: Section, metric: str, targets: Sequence[float]) -> dict[str, Any]:
    """Return rounds to the targets, speed-up and final metric of finished runs, with warnings."""
    finished: dict[str, list[Outcome]] = {}
    outcomes, unfinished = [], []
    for series in section.series:
        for run, outcome in zip(series.runs, series.outcomes(), strict=True):
            outcomes.append(replace(outcome, spec={**outcome.spec, "algorithm": series.label}))
            if run.result is not None:
                finished.setdefault(series.label, []).append(outcome)
            else:
                name = f"{series.label} (seed {run.spec['seed']})"
                unfinished.append(f"{name} is {status(run)}; in the curves, not in the table")
    notices = [*tables.warning_lines(outcomes), *unfinished]
    if not finished:
        return {"notices": notices}
    higher = section.direction(metric)
    references = {a: b for a, b in section.references.items() if a in finished and b in finished}
    by_target = {
        target: summarise_groups(finished, metric, target, 1, higher, references)
        for target in targets or (None,)
    }
    lines = next(iter(by_target.values()))
    longest = max(run.spec["rounds"] for run in section.runs)
    headers, cells = tables.comparison_table(by_target, metric, longest, higher=higher)
    by_label = {series.label: series for series in section.series}
    rows = [(by_label[name], rest) for name, *rest in cells]
    sent = [_bytes_sent(line, finished[line.algorithm]) for line in lines]
    if any(number is not None for number in sent):
        headers = [*headers, "sent per run"]
        for (_, row), number in zip(rows, sent, strict=True):
            row.append(NOTHING if number is None else tables.format_bytes(number))
    return {"notices": notices, "caption": _caption(lines), "headers": headers, "rows": rows}


def _caption(lines: Sequence[Line]) -> str:
    """Return the caption of the comparison, with what its cells leave out."""
    parts = ["Mean and standard deviation over seeds"]
    if any(line.short for line in lines):
        parts.append("seeds with too few rounds to reach the target do not count")
    if len({line.reference for line in lines if line.speedup is not None}) > 1:
        parts.append("speed-ups are over FedAvg with the nearest settings")
    return "; ".join(parts)


def _bytes_sent(line: Line, outcomes: Sequence[Outcome]) -> float | None:
    """Return the mean bytes up and down until the round of the final values; None if unknown."""
    totals = []
    for outcome in outcomes:
        rows = outcome.rows[: line.final_round]
        whole = len(rows) == line.final_round or outcome.status == "target"
        if whole and outcome.diverged_at is None:
            totals.append([row.get(name) for row in rows for name in ("bytes_up", "bytes_down")])
    if not totals or any(number is None for numbers in totals for number in numbers):
        return None
    return sum(number or 0.0 for numbers in totals for number in numbers) / len(totals)


def full_specs(section: Section) -> list[tuple[str, str]]:
    """Return the complete spec of one run per series, as TOML, under a heading."""
    import tomli_w

    specs = [(series.label, series.runs[0].spec) for series in section.series]
    return [
        (
            f"Full spec of {label}, seed {spec['seed']}",
            tomli_w.dumps(spec | {"options": effective_options(spec.get("options", {}))}),
        )
        for label, spec in specs
    ]


def run_list(section: Section, metric: str) -> tuple[list[str], list[tuple[Series, list[Any]]]]:
    """Return every run: how it ended, how long it took, and its engine where that is recorded."""
    rows = []
    for series in section.series:
        for run in series.runs:
            engine = engine_entries(run.environment)
            name, implementation = engine.get("engine"), engine.get("engine implementation")
            row = {
                "seed": run.spec["seed"],
                "status": status(run),
                "rounds": len(run.rows),
                f"last {metric.replace('_', ' ')}": last_value(run, metric),
                "wall time": duration(wall_time(run)),
                "engine": f"{name} ({implementation})" if implementation else name,
                "folder": run.folder.name,
            }
            rows.append((series, row))
    headers = [n for n in rows[0][1] if n != "engine" or any(row[n] for _, row in rows)]
    cells = [(s, [NOTHING if row[n] is None else row[n] for n in headers]) for s, row in rows]
    return ["algorithm", *headers], cells


def wall_time(run: StoredRun) -> float:
    """Return the seconds that a run took; without evaluations if it is unfinished."""
    if run.result is not None:
        return float(run.result["seconds"])
    return sum(row.get("seconds") or 0.0 for row in run.rows)


def last_value(run: StoredRun, metric: str) -> str:
    """Return the last value of a metric, formatted."""
    values = [row[metric] for row in run.rows if row.get(metric) is not None]
    return tables.format_value(values[-1], metric) if values else NOTHING


def duration(seconds: float) -> str:
    """Format seconds with units.

    >>> duration(4.25), duration(125), duration(7300)
    ('4.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


# Environments.

# What differs from run to run, or is shown elsewhere.
NOT_SHOWN = ("command", "started", "resumed", "metric", "goal", "target", "engine")


def environments(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Return each combination of machine, versions and engine once, with its number of runs."""
    groups: dict[frozenset[tuple[str, str]], tuple[dict[str, str], list[StoredRun]]] = {}
    for run in runs:
        shown = {k: v for k, v in run.environment.items() if k not in NOT_SHOWN}
        entries = {name: value_text(value) for name, value in flat(shown).items()}
        entries |= engine_entries(run.environment)
        groups.setdefault(frozenset(entries.items()), (entries, []))[1].append(run)
    return [
        {"runs": str(len(group)), "wall time": duration(sum(map(wall_time, group)))} | entries
        for entries, group in groups.values()
    ]


def engine_entries(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the recorded choice of the engine with display names; empty where there is none.

    >>> engine_entries({"engine": {"name": "batched", "implementation": "vmap", "reason": None}})
    {'engine': 'batched', 'engine implementation': 'vmap'}
    """
    choice = environment.get("engine")
    if not isinstance(choice, Mapping):
        return {}
    names = {
        "name": "engine",
        "reason": "engine reason",
        "implementation": "engine implementation",
        "cuda_graph": "CUDA graph",
    }
    return {names[key]: str(choice[key]) for key in names if choice.get(key) is not None}
