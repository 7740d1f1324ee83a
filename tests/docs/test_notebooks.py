"""The tutorials: stored with their outputs, run again, and the widget against the package."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nbformat import NotebookNode
from playwright.sync_api import Browser, Page
from tools.docs.run_notebooks import (
    TUTORIALS,
    checked_texts,
    cleaned,
    executed,
    notebooks,
    read,
    serialised,
)

import fedexp as fx
from fedexp.cli.main import main
from tests.docs.snippets import agree
from tests.helpers.browser import chromium, needs_browser

NAMES = [path.name for path in notebooks()]
LARGEST = 400_000  # bytes of a file
MACHINE = re.compile(r"/(?:root|home|tmp|work|Users)/|\b20\d\d-\d\d-\d\d\b|Warning\b")


def stored(name: str) -> NotebookNode:
    return read(TUTORIALS / name)


def test_there_are_four_tutorials() -> None:
    assert [name[0] for name in NAMES] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stored_executed_and_clean(name: str) -> None:
    notebook = stored(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert checked_texts(notebook)
    assert all(checked_texts(notebook))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    for output in outputs:
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not MACHINE.search(text), text
    for line in (line for cell in notebook.cells for line in cell.source.splitlines()):
        assert "pip install 'fedexp" not in line, f"the package is on no index: {line}"
    path = TUTORIALS / name
    assert path.stat().st_size < LARGEST
    assert serialised(cleaned(stored(name))) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_and_print_the_stored_numbers(name: str, tmp_path: Path) -> None:
    again = executed(TUTORIALS / name, tmp_path / "notebook")
    for found, expected in zip(checked_texts(again), checked_texts(stored(name)), strict=True):
        assert agree(found, expected), f"{found}\nwhere this is stored:\n{expected}"


def test_agreement_of_texts() -> None:
    assert agree("step 1.204, true", "step  1.2, true")
    assert not agree("step 1.3, true", "step 1.2, true")
    assert not agree("step 1.2, false", "step 1.2, true")
    assert not agree("step 1.2", "step 1.2 and 3")


def commands(name: str) -> list[list[str]]:
    """Return the `fedexp` commands in the text of a notebook, with one seed and one process."""
    texts = [cell.source for cell in stored(name).cells if cell.cell_type == "markdown"]
    lines = re.findall(r"^    fedexp (.+)$", "\n".join(texts), re.MULTILINE)
    return [re.sub(r" --(seeds|jobs) \d+", "", line).split() for line in lines]


def study_file(name: str) -> str:
    """Return the cells that define `task`, without figures, as the text of a file."""
    code = [cell.source for cell in stored(name).cells if cell.cell_type == "code"]
    last = next(k for k, source in enumerate(code) if "\ntask = fx.supervised(" in source)
    return "\n".join(source for source in code[: last + 1] if "plt.show()" not in source)


def rule_file(name: str) -> str:
    """Return the file that a notebook writes by `%%writefile`."""
    code = [cell.source for cell in stored(name).cells if cell.cell_type == "code"]
    (source,) = (source for source in code if source.startswith("%%writefile"))
    return source.partition("\n")[2]


@pytest.mark.parametrize(
    ("number", "file", "source"), [(2, "study.py", study_file), (3, "smooth.py", rule_file)]
)
def test_commands_in_the_text_run(
    number: int,
    file: str,
    source: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = NAMES[number - 1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(file).write_text(source(name), encoding="utf-8")
    for command in commands(name):
        short = [] if command[0] == "report" else ["--rounds", "1", "--jobs", "1"]
        assert main([*command, *short]) == 0, " ".join(command)
    sys.modules.pop(Path(file).stem, None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def widget(browser: Browser) -> Iterator[Page]:
    """The widget on an empty page; nothing may be requested or logged."""
    page, seen = browser.new_page(), list[str]()
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.set_content((TUTORIALS / "toy_widget.html").read_text(encoding="utf-8"))
    yield page
    assert seen == []
    page.close()


def expected_path(rule: fx.ServerRule, angle: float, rounds: int) -> tuple[Any, list[float]]:
    """Return iterates and step sizes with exact projections onto two lines through (0, 3)."""
    normals = [(np.cos(a), np.sin(a)) for a in np.pi / 4 - np.radians([angle, 0.0])]
    lines = [fx.projections.Affine([normal], [3 * normal[1]]) for normal in normals]
    w = torch.zeros(2, dtype=torch.float64)
    points, steps, state = [w], list[float](), rule.init(w)
    for _ in range(rounds):
        total = fx.Aggregate.of([w - line.project(w) for line in lines])
        w, state, metrics = rule.step(w, total, state)
        points.append(w)
        steps.append(float(metrics["server_lr"]))
    return torch.stack(points).numpy(), steps


@needs_browser
@pytest.mark.parametrize(("angle", "log_eps"), [(26.6, -4.1), (8, -4.1), (90, -2), (60, 0.5)])
def test_the_widget_computes_what_the_package_does(
    widget: Page, angle: float, log_eps: float
) -> None:
    for name, value in {"angle": angle, "eps": log_eps, "rounds": 9}.items():
        slider = widget.locator(f"[name={name}]")
        slider.evaluate("(slider, value) => { slider.value = value; }", value)
        slider.dispatch_event("input", {"bubbles": True})
    result = widget.locator(".toy-widget").evaluate("(root) => root.result")
    eps = 0.0 if log_eps < -4 else 10.0**log_eps
    assert (result["angle"], result["rounds"]) == (angle, 9)
    assert math.isclose(result["eps"], eps)
    for name, rule in {"FedAvg": fx.Average(), "FedExP": fx.ExP(eps=eps, factor=1.0)}.items():
        points, steps = expected_path(rule, angle, 9)
        path = result["paths"][name]
        np.testing.assert_allclose(path["points"], points, rtol=0, atol=1e-9)
        away = np.linalg.norm(points[:-1] - [0, 3], axis=1) > 1e-9  # at the optimum it is 0 / 0
        np.testing.assert_allclose(np.array(path["steps"])[away], np.array(steps)[away], rtol=1e-6)
        row = widget.locator("tbody tr", has_text=name).first.inner_text()
        assert f"{path['steps'][-1]:.2f}" in row
    points, _ = expected_path(fx.ExP(eps=eps, factor=1.0), angle, 9)
    averaged = result["paths"]["FedExP, mean of the last two"]["points"]
    np.testing.assert_allclose(averaged[-1], points[-2:].mean(axis=0), atol=1e-9)


def test_the_stored_notebook_has_the_widget() -> None:
    (path,) = (path for path in notebooks() if path.name.startswith("1"))
    outputs = [o for cell in stored(path.name).cells for o in cell.get("outputs", [])]
    pages = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert (TUTORIALS / "toy_widget.html").read_text(encoding="utf-8") in pages
