"""The little HTML that the page is made of; all text is escaped here and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from fedexp.report.gather import Series
from fedexp.report.palette import SVG_DASHES, day, night


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
