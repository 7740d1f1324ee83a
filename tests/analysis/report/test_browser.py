"""The page in a real browser: legend, hover, log axis, phone, dark mode, no requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page

from fedexp.analysis.report.page import render, write_page, write_report
from fedexp.analysis.report.sections import Targets, load_runs, sections
from tests.helpers.browser import chromium, needs_browser
from tests.helpers.stored_runs import write

HERE = ("file:", "data:", "blob:")
pytestmark = needs_browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of two algorithms and three seeds, one of which has not finished."""
    folder = tmp_path_factory.mktemp("report")
    for seed in range(3):
        write(folder / "runs", "fedavg", seed, 30 if seed else 20, speed=0.05)
        write(folder / "runs", "fedexp", seed, speed=0.2)
    runs, problems = load_runs([folder / "runs"])
    assert not problems
    write_page(folder / "report.html", render(sections(runs), (), Targets()))
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


class Visit:
    """An open page, its requests and its console messages."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.goto(address)
        self.page.wait_for_function("document.querySelectorAll('.main-svg').length > 0")

    def plots(self) -> list[Locator]:
        return self.page.locator(".plot").all()

    def check(self) -> None:
        """Check that no request left the page and that the console is empty."""
        assert self.requests
        assert [url for url in self.requests if not url.startswith(HERE)] == []
        assert self.messages == []


@pytest.fixture(scope="module")
def desktop(browser: Browser, address: str) -> Iterator[Visit]:
    opened = Visit(browser, address, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()


@pytest.fixture
def visit(desktop: Visit) -> Iterator[Visit]:
    """One visit for several tests, each of which leaves the page as it was."""
    yield desktop
    desktop.check()


def visible(plot: Locator, name: str) -> set[bool]:
    """Return whether the traces of a series are shown: line, band and markers."""
    script = "(plot, name) => plot.data.filter((t) => t.name === name).map((t) => t.visible)"
    return set(plot.evaluate(script, name))


def hover(page: Page, plot: Locator, fraction: float) -> str:
    """Return the hover text at a fraction of the width."""
    area = plot.locator(".nsewdrag").first.bounding_box()
    assert area is not None
    page.mouse.move(area["x"] + fraction * area["width"], area["y"] + area["height"] / 2)
    page.mouse.move(area["x"] + fraction * area["width"] + 1, area["y"] + area["height"] / 2)
    label = plot.locator(".hoverlayer .legend")
    label.wait_for()
    return label.text_content() or ""


def test_a_key_hides_its_series_in_all_charts(visit: Visit) -> None:
    plots = visit.plots()
    assert len(plots) == 4
    key = visit.page.get_by_role("button", name="fedavg", exact=True)
    assert all(visible(plot, "fedavg") == {True} for plot in plots)
    lines = visit.page.locator(".scatterlayer .js-line").count()
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert all(visible(plot, "fedavg") == {False} for plot in plots)
    assert all(visible(plot, "fedexp") == {True} for plot in plots)
    assert 0 < visit.page.locator(".scatterlayer .js-line").count() < lines
    key.press("Enter")  # and by the keyboard it comes back
    assert all(visible(plot, "fedavg") == {True} for plot in plots)


def test_hovering_shows_round_and_values(visit: Visit) -> None:
    plot = visit.plots()[0]
    text = hover(visit.page, plot, 1.0 - 2 / 29)
    means = plot.evaluate(
        "(plot) => plot.data.filter((t) => t.text).map((t) => [t.name, t.x, t.y])"
    )
    assert "round 29" in text
    for name, rounds, values in (mean for mean in means if 29 in mean[1]):
        assert f"{name}  {100 * values[rounds.index(29)]:.2f}% ±" in text
    assert "(2 of 3 seeds)" in text
    assert text.count("±") == 2


def test_the_axis_switches_to_log_and_back(visit: Visit) -> None:
    figure = visit.page.locator("figure[data-chart=server_lr]")
    scale = "(plot) => plot._fullLayout.yaxis.type"
    log = figure.get_by_role("button", name="log axis")
    assert figure.locator(".plot").evaluate(scale) == "linear"
    log.click()
    assert figure.locator(".plot").evaluate(scale) == "log"
    assert log.get_attribute("aria-pressed") == "true"
    assert visit.plots()[0].evaluate(scale) == "linear"  # each chart has its own
    figure.get_by_role("button", name="linear axis").click()
    assert figure.locator(".plot").evaluate(scale) == "linear"


def test_smoothing_draws_the_mean_over_a_window(visit: Visit) -> None:
    last = "(plot) => plot.data.find((t) => t.name === 'fedexp' && t.text).y.at(-1)"
    plot = visit.page.locator("figure[data-chart=train_loss] .plot")
    raw = plot.evaluate(last)
    smooth = visit.page.get_by_role("button", name="smooth")
    smooth.click()
    assert plot.evaluate(last) > 2 * raw  # a falling loss was higher before
    smooth.click()
    assert plot.evaluate(last) == raw


def test_an_unfinished_run_has_a_mark(visit: Visit) -> None:
    marks = "(plot) => plot.data.flatMap((t) => t.mode === 'markers' ? t.text : [])"
    texts = visit.plots()[0].evaluate(marks)
    assert texts == ["fedavg, seed 0: unfinished: 20 of 30 rounds"]


def test_a_phone_does_not_scroll_sideways(browser: Browser, address: str) -> None:
    size = {"width": 390, "height": 844}
    visit = Visit(browser, address, viewport=size, is_mobile=True, has_touch=True)
    width = visit.page.evaluate("document.documentElement.scrollWidth")
    assert width == visit.page.evaluate("innerWidth") == 390
    for plot in visit.plots():
        box = plot.locator(".main-svg").first.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    wide = "[...document.querySelectorAll('.scroll')].filter((b) => b.scrollWidth > b.clientWidth)"
    assert visit.page.evaluate(f"{wide}.length") > 0  # a wide table scrolls in its own box
    visit.check()
    visit.context.close()


def test_dark_mode_applies_while_the_page_is_open(visit: Visit) -> None:
    def colours() -> tuple[str, str, str]:
        page, first = visit.page, visit.plots()[0]
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        line = first.evaluate("(plot) => plot.data.find((t) => t.text).line.color")
        return paper, line, first.evaluate("(plot) => plot._fullLayout.font.color")

    text_has_changed = (
        "(before) => document.querySelector('.plot')._fullLayout.font.color !== before"
    )
    day = colours()
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_function(text_has_changed, arg=day[2])
    assert all(before != after for before, after in zip(day, colours(), strict=True))
    visit.page.emulate_media(color_scheme="light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_long_names_and_many_columns_fit_a_small_phone(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    for name in ("fedavg", "fedexp", "a_rule_of_my_own_whose_name_is_longer_than_a_telephone"):
        folder = write(tmp_path / "runs", name, 0)
        rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        more = {"test_a_metric_with_a_rather_long_name": 0.5, "bytes_up": 9, "bytes_down": 9}
        text = "".join(json.dumps(row | more) + "\n" for row in rows)
        (folder / "records.jsonl").write_text(text)
    page = write_report([tmp_path / "runs"], tmp_path / "report.html").page
    size = {"width": 360, "height": 740}
    options = {"viewport": size, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    visit = Visit(browser, page.as_uri(), **options)
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.page.evaluate("innerWidth") == 360
    buttons = "[...document.querySelectorAll('button, h2, h3, caption span, .goal')]"
    right = f"Math.max(...{buttons}.map((e) => e.getBoundingClientRect().right))"
    assert visit.page.evaluate(right) <= 360
    visit.check()
    visit.context.close()


def test_the_axis_is_that_of_the_runs_that_did_not_diverge(
    browser: Browser, tmp_path: Path
) -> None:
    write(tmp_path / "runs", "fedexp", 0)
    folder = write(tmp_path / "runs", "fedadam", 0, count=9)
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    rows[-1]["train_loss"] = 1e20
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"status": "diverged", "rounds": 9, "diverged_at": 9, "seconds": 1.0}
    (folder / "result.json").write_text(json.dumps(result))
    page = write_report([tmp_path / "runs"], tmp_path / "report.html").page
    visit = Visit(browser, page.as_uri())
    plot = visit.page.locator("figure[data-chart=train_loss] .plot")
    assert plot.evaluate("(plot) => plot._fullLayout.yaxis.range[1]") < 2
    cross = "(plot) => plot.data.find((t) => t.name === 'fedadam' && t.mode === 'markers').y[0]"
    assert plot.evaluate(cross) < 2
    visit.page.locator("figure[data-chart=train_loss]").get_by_role(
        "button", name="log axis"
    ).click()
    assert plot.evaluate("(plot) => 10 ** plot._fullLayout.yaxis.range[1]") < 2
    visit.check()
    visit.context.close()
