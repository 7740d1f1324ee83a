"""The Flower baseline: it builds, trains as the simulator does, and prints stored figures only."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

import fedexp as fx
from fedexp.runs import load_run
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.publishing import broken_rules, internals

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "integrations" / "flower-baseline"
sys.path.append(str(BASELINE))

from fedexp_baseline import client_app, server_app  # noqa: E402

CLIENTS, COHORT, ROUNDS = 5, 3, 2
CONFIG = tomllib.loads((BASELINE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # in Flower
def test_the_baseline_builds_and_may_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert broken_rules(BASELINE) == []
    assert len([*tmp_path.glob("fedexp.fedexp-baseline.1-0-0.*.fab")]) == 1
    assert internals(BASELINE / "fedexp_baseline") == []


@pytest.mark.parametrize("algorithm", ["fedexp", "scaffold"])
def test_two_rounds_are_those_of_the_simulator(algorithm: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"task.clients": CLIENTS, "local.lr": 0.1}
    config = {
        **CONFIG,
        "task": "digits",
        "algorithm": algorithm,
        "options": " ".join(f"{name}={value}" for name, value in options.items()),
        "num-server-rounds": ROUNDS,
        "clients-per-round": COHORT,
        "checkpoint": str(tmp_path / "run"),
    }
    grid = FakeGrid(client_app.app, CLIENTS, run_config=config)
    server_app.app(grid=grid, context=Context(1, 1, {}, RecordDict(), config))
    rows = load_run(tmp_path / "run").rows
    records = list(fx.simulate("digits", algorithm, ROUNDS, COHORT, options=options))
    assert [row["clients"] for row in rows] == [COHORT] * ROUNDS
    steps = [record.server_lr for record in records]
    assert [row["server_lr"] for row in rows] == pytest.approx(steps, rel=1e-5)
    assert rows[0]["test_loss"] is None  # evaluate-every is 5
    assert rows[-1]["test_loss"] == pytest.approx(records[-1].test_loss, rel=1e-5)


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows of a page's tables of rounds to a target, by that target."""
    parts = re.split(r"\| rounds to (\d+)\s% \|", page.read_text())
    rows = {}
    for target, text in zip(parts[1::2], parts[2::2], strict=True):
        lines = text.split("\n\n")[0].splitlines()[2:]
        rows[target] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows


def test_the_figures_are_those_of_the_archive() -> None:
    """Algorithm, rounds, the paper's, speed-up, the paper's, and the final accuracy."""
    archive, printed = tables(ROOT / "docs" / "reproduction.md"), tables(BASELINE / "README.md")
    assert printed.keys() == archive.keys() == {"84", "72", "40"}
    for target, rows in archive.items():
        of_paper = [row for row in rows if row[1] and "mode" not in row[0]]
        assert printed[target] == [[row[k] for k in (0, 1, 4, 6, 7, 8)] for row in of_paper]
