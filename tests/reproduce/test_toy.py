"""Figure 2: the trajectories of the toy problem, and the checks of the paper's statements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedexp.cli.main import main
from fedexp.reproduce.toy import LAST, MEAN, PLAIN, toy_checks, toy_figure, toy_paths

FILES = {"table.md", "table.csv", "summary.json", "figure.png", "figure.svg", "figure.pdf"}


def test_toy_shows_what_figure_2_shows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "toy", "--out", str(tmp_path / "out")]) == 0
    out, _ = capfd.readouterr()
    assert "distance to the optimum falls every round: yes (30 of 30 rounds)" in out
    assert "SHRUNK" not in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [check["holds"] for check in summary["checks"]] == [True] * 7
    last = next(line for line in summary["lines"] if line["iterate"] == LAST)
    assert last["rounds the distance grows in"]["ours"]["mean"] == 0
    assert last["rounds the loss grows in"]["ours"]["mean"] == 15


def test_the_checks_can_fail() -> None:
    """FedAvg in place of FedExP: its distance falls too, but nothing else holds."""
    paths = dict(toy_paths((0.0, 0.0), 30))
    swapped = toy_checks({**paths, LAST: paths[PLAIN]})
    names = ("start", "distance", "oscillation", "turns", "mean", "faster", "two")
    verdicts = {name: check.holds for name, check in zip(names, swapped, strict=True)}
    assert verdicts["distance"]
    assert not verdicts["turns"]
    assert not verdicts["faster"]
    away = replace(paths[LAST], points=paths[LAST].points.flip(0))
    assert not toy_checks({**paths, LAST: away})[1].holds
    calm = replace(paths[LAST], loss=sorted(paths[LAST].loss, reverse=True))
    assert not toy_checks({**paths, LAST: calm})[2].holds


def test_distance_falls_loss_oscillates_and_the_mean_of_two_is_lower() -> None:
    paths = toy_paths((0.0, 0.0), 30)
    distance = np.array(paths[LAST].sq_distance)
    assert (np.diff(distance) < 0).all()
    assert (np.diff(paths[LAST].loss) > 0).sum() >= 10
    assert np.mean(np.log(paths[MEAN].loss[2:])) < np.mean(np.log(paths[LAST].loss[2:]))
    assert distance[-1] < 1e-3 * paths[PLAIN].sq_distance[-1]
    assert len(toy_figure(paths).axes) == 3
