"""The page: a template, the tables, the numbers of the curves, and plotly.js, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fedexp import __version__
from fedexp.data.extras import extra
from fedexp.errors import UsageError
from fedexp.report import tables
from fedexp.report.charts import Payload, chart_names, describe, judge, section_payload, title
from fedexp.report.gather import Section
from fedexp.report.html import Markup, escape, join, swatch, tag
from fedexp.report.series import WINDOW
from fedexp.report.targets import Targets
from fedexp.runs.atomic import write_bytes

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
            "environments": tables.environments([run for s in sections for run in s.runs]),
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
        tables.comparison(section, metric, targets.of(section, metric)),
        _toolbar(at, section),
        tag("div", *(_chart(at, section, name) for name in names), class_="charts"),
        tag("h3", "Settings"),
        tables.common_settings(section),
        tables.full_specs(section),
        tag("h3", "Runs"),
        tables.run_list(section, metric),
        tag("h3", "How to rerun"),
        tables.commands(section),
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
    return resources.files("fedexp.report").joinpath(name).read_text("utf-8")
