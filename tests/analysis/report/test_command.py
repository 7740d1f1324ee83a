"""`fedexp report` from the command line, and its static figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedexp.analysis.report.charts import curves_figure
from fedexp.analysis.report.sections import sections
from fedexp.cli.main import main
from tests.helpers.stored_runs import stored, write


def test_from_runs_to_a_page_and_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "runs"
    for algorithm in ("fedavg", "fedexp"):
        command = ["run", "toy", "--algorithm", algorithm, "--rounds", "4", "--runs", str(root)]
        assert main(command) == 0
    out, figures = tmp_path / "new" / "report.html", tmp_path / "figures"
    assert main(["report", str(root), "-o", str(out), "--figures", str(figures)]) == 0
    assert "(2 runs, 1 task)" in capfd.readouterr().err
    text = out.read_text()
    assert "fedexp run toy --algorithm fedavg --seed 0 --rounds 4 --cohort all" in text
    assert "plotly.js v" in text
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for ending, magic in starts.items():
        assert (figures / f"curves.{ending}").read_bytes().startswith(magic)


def test_mistakes_get_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(write(tmp_path / "runs", "fedavg", 0))
    empty = tmp_path / "empty"
    empty.mkdir()
    mistakes = {
        str(tmp_path / "nowhere"): "no such folder",
        str(empty): "there is no run in",
        f"{run} --metric acuracy": "unknown metric 'acuracy'",
        f"{run} -o {empty}": "empty is a folder; name a file, e.g. -o ",
        f"{run} -o .": ". is a folder; name a file, e.g. -o report.html",
        f"{run} -o {run}/spec.toml/page.html": "cannot write",
        f"{run} --target toy=often": "--target must be a number",
        f"{run} --target tou=0.9": "did you mean toy",
        f"{run} -o {tmp_path}/r.html --figures {run}/spec.toml": "choose another --figures",
    }
    for arguments, message in mistakes.items():
        assert main(["report", *arguments.split()]) == 2
        errors = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
        assert len(errors) == 1
        assert message in errors[0]
    assert not (tmp_path / "r.html").exists()  # found before the page is written


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page"
    write(runs, "fedavg", 0)
    page.mkdir()
    old = page / "report.html"
    old.write_text("old")
    (page / ".report.html.tmp").mkdir()  # in the way of the new one
    assert main(["report", str(runs), "-o", str(old)]) == 2
    assert old.read_text() == "old"


def test_a_damaged_run_is_left_out_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs", "fedavg", 0)
    (write(tmp_path / "runs", "fedexp", 0) / "spec.toml").write_text("task = ")
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(out)]) == 0
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "left out" in warnings[0]
    assert "--algorithm fedexp" not in out.read_text()


def test_panels_of_one_row_show_one_metric() -> None:
    plain = stored(options={"task.start": "1,1"})
    for row in plain.rows:
        row["test_accuracy"] = None
    figure = curves_figure(sections([stored(), stored("fedavg", speed=0.3), plain]))
    panels = [axes if axes.get_visible() else None for axes in figure.axes]
    shown = [panel and panel.get_ylabel() for panel in panels]
    accuracy, loss, step = "test accuracy", "training loss", "server step size"
    assert shown == [accuracy, loss, loss, None, step, step]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["fedexp", "fedavg"]
