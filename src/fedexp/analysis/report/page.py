"""The little HTML that the page is made of; all text is escaped here and nowhere else.

The tables of a section: the comparison, the settings, the runs and their environments.

The page: a template, the tables, the numbers of the curves, and plotly.js, in one file.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedexp import __version__
from fedexp.analysis.report.charts import (
    SVG_DASHES,
    Payload,
    chart_names,
    day,
    describe,
    judge,
    night,
    section_payload,
    title,
)
from fedexp.analysis.report.sections import (
    WINDOW,
    Section,
    Series,
    Targets,
    shared_and_apart,
    status,
    value_text,
)
from fedexp.analysis.summary import summarise
from fedexp.analysis.tables import comparison_table, format_value, warning_lines
from fedexp.errors import UsageError
from fedexp.optional import extra
from fedexp.runs import StoredRun
from fedexp.runs.files import write_bytes
from fedexp.runs.folder import rerun
from fedexp.runs.spec import Outcome


class Markup(str):
    """HTML that has been made here: it is not escaped again."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Text as HTML.

    >>> escape("<b>"), escape(Markup("<b>"))
    ('&lt;b&gt;', '<b>')
    """
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element; `class_` and `for_` lose their underscore, others change it to a hyphen.

    >>> print(tag("p", "a < b", class_="note", data_at=1))
    <p class="note" data-at="1">a &lt; b</p>
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    written = "".join(f' {key}="{escape(value)}"' for key, value in pairs if value is not None)
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    """The parts one after the other."""
    return Markup("".join(map(escape, parts)))


def table(
    caption: str, headers: Sequence[str], cells: Iterable[Sequence[object]], style: str = "figures"
) -> Markup:
    """A table in a box of its own to scroll in; the first column names the rows."""
    head = tag("tr", *(tag("th", text, scope="col") for text in headers))
    rows = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in others))
        for first, *others in cells
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", *rows),
        class_=style,
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def definitions(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names and values that stand side by side."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def swatch(series: Series) -> Markup:
    """A piece of the series' line."""
    line = tag("line", x1=1, y1=5, x2=25, y2=5, stroke_dasharray=SVG_DASHES[_at(series)])
    colours = f"--day: {day(series.algorithm)}; --night: {night(series.algorithm)}"
    return tag("svg", line, class_="swatch", viewBox="0 0 26 10", style=colours, aria_hidden="true")


def named(series: Series) -> Markup:
    """The series' name beside a piece of its line."""
    return tag("span", swatch(series), tag("span", series.label), class_="named")


def _at(series: Series) -> int:
    return series.variant % len(SVG_DASHES)


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


SYMBOLS = {"server_lr": Markup("η<sub>g</sub>"), "diversity": Markup("<i>r</i>")}


def render(sections: Sequence[Section], wanted: Sequence[str], targets: Targets) -> str:
    """The whole page as text.

    Args:
        sections: what is shown, in this order.
        wanted: the metrics to draw; empty for the usual ones.
        targets: the value of its metric that counts as reached, task by task.
    """
    plotly, script = plotly_source(), _file("page.js")
    payload = [_numbers(section, wanted, targets) for section in sections]
    return _fill(
        _file("page.html"),
        {
            "policy": escape(_policy(plotly, script)),
            "style": _file("page.css"),
            "title": escape(_title(sections)),
            "lead": escape(_lead(sections)),
            "contents": _contents(sections),
            "sections": join(_section(i, s, wanted, targets) for i, s in enumerate(sections)),
            "environments": environments([run for s in sections for run in s.runs]),
            "version": escape(__version__),
            "data": _as_script(payload),
            "plotly": plotly,
            "script": script,
        },
    )


def write_page(path: Path, text: str) -> None:
    """Either the whole page is there, or what was there before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another -o") from None


def plotly_source() -> str:
    """plotly.js, from the Python package that carries it."""
    return str(extra("plotly.offline", "a report", "plotly", "report").get_plotlyjs())


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _numbers(section: Section, wanted: Sequence[str], targets: Targets) -> Payload:
    metric = judge(section, wanted)
    names = chart_names(section, wanted)
    return section_payload(section, names, metric, targets.of(section, metric))


def _section(at: int, section: Section, wanted: Sequence[str], targets: Targets) -> Markup:
    metric = judge(section, wanted)
    names = chart_names(section, wanted)
    parts = [
        tag("h2", section.title, id=f"task-{at}"),
        tag("p", _summary(section), class_="summary"),
        comparison(section, metric, targets.of(section, metric)),
        _toolbar(at, section),
        tag("div", *(_chart(at, section, name) for name in names), class_="charts"),
        tag("h3", "Settings"),
        common_settings(section),
        full_specs(section),
        tag("h3", "Runs"),
        run_list(section, metric),
        tag("h3", "How to rerun"),
        commands(section),
    ]
    return tag("section", *parts, data_section=at, aria_labelledby=f"task-{at}")


def _toolbar(at: int, section: Section) -> Markup:
    """The legend, whose keys hide and show, and the switch for smoothing."""
    keys = [
        tag("button", swatch(series), series.label, class_="key", type="button", data_series=i,
            aria_pressed="true", title="hide or show in all charts")
        for i, series in enumerate(section.series)
    ]  # fmt: skip
    smoothing = tag(
        "button", f"smooth, {WINDOW} rounds", class_="smooth", type="button", aria_pressed="false",
        title=f"mean and spread over seeds and the last {WINDOW} rounds",
    )  # fmt: skip
    legend = tag("div", *keys, class_="legend", role="group", aria_label="Series")
    return tag("div", legend, smoothing, class_="toolbar")


def _chart(at: int, section: Section, name: str) -> Markup:
    scales = [
        tag("button", scale, type="button", data_scale=scale, aria_pressed="false",
            aria_label=f"{scale} axis of {title(name)}")
        for scale in ("linear", "log")
    ]  # fmt: skip
    return tag(
        "figure",
        tag(
            "div",
            tag("h3", title(name), " ", SYMBOLS.get(name, "")),
            tag("div", *scales, class_="scale", role="group", aria_label="Vertical axis"),
            class_="head",
        ),
        tag("div", class_="plot", role="img", aria_label=describe(section, name)),
        data_chart=name,
    )


def _contents(sections: Sequence[Section]) -> Markup:
    """Links to the sections, where there is more than one."""
    links = [tag("a", s.title, href=f"#task-{at}") for at, s in enumerate(sections)]
    return tag("nav", *links, aria_label="Tasks") if len(links) > 1 else Markup("")


def _title(sections: Sequence[Section]) -> str:
    return "FedExP report: " + ", ".join(dict.fromkeys(section.task for section in sections))


def _lead(sections: Sequence[Section]) -> str:
    runs = [run for section in sections for run in section.runs]
    days = sorted({str(run.environment.get("started", ""))[:10] for run in runs} - {""})
    when = f", run {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    return f"{count(len(runs), 'run')} on {count(len(sections), 'task')}{when}."


def _summary(section: Section) -> str:
    spec = section.runs[0].spec
    asked = sorted({run.spec["rounds"] for run in section.runs})
    rounds = count(asked[-1], "round") if len(asked) == 1 else f"{asked[0]} to {asked[-1]} rounds"
    seeds = max(len(series.runs) for series in section.series)
    clients = "clients on Flower"  # whose number is not fixed
    if "clients" in spec:
        clients = f"{spec.get('cohort') or spec['clients']} of {spec['clients']} clients a round"
    return f"{rounds}, {clients}, {count(seeds, 'seed')}"


def _policy(*scripts: str) -> str:
    """No request at all, and no script but these: what the browser is told to enforce."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _as_script(payload: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _fill(template: str, values: dict[str, str]) -> str:
    """Put values for the names in double braces, in one pass: what is put in is not looked at."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _file(name: str) -> str:
    return resources.files("fedexp.analysis.report").joinpath(name).read_text("utf-8")
