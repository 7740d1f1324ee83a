"""Figures and notes of a search: every trial is drawn, also those that failed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedexp.analysis.plots import new_figure
from fedexp.tuning.results import draw_heatmap, remarks, tuning_figure
from fedexp.tuning.search import tune
from tests.helpers.tuning import small_study


def test_a_heat_map_shows_every_number_and_frames_the_chosen() -> None:
    _, (axes,) = new_figure(1)
    cells = np.array([[0.5, 0.25], [np.nan, 0.75]])
    draw_heatmap(axes, [0.01, 0.1], [1.0, 10.0], cells, "train_accuracy", frame=(1, 1))
    assert [text.get_text() for text in axes.texts] == ["50.0", "25.0", "div.", "75.0"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.1"]
    (frame,) = axes.patches
    assert frame.get_xy() == (0.5, 0.5)  # type: ignore[attr-defined]


def test_a_grid_that_diverged_everywhere_can_be_drawn(tmp_path: Path) -> None:
    values = {"server.lr": (1.0, 2.0), "local.lr": (5.0, 9.0)}
    study = small_study(tmp_path / "s.db", values=values, rounds=30)
    trials = tune(study)
    figure = tuning_figure(study, trials)
    assert [text.get_text() for text in figure.axes[0].texts] == ["div."] * 4
    assert remarks(study, trials)[0] == "4 of 4 trials diverged"


def test_a_free_search_is_drawn_as_points(tmp_path: Path) -> None:
    values = {"server.lr": (1.0, 30.0), "local.lr": (0.01, 0.1)}
    study = small_study(tmp_path / "s.db", protocol="free", values=values, trials=5)
    figure = tuning_figure(study, tune(study))
    assert figure.axes[0].get_xscale() == "log"
    drawn = [np.asarray(each.get_offsets()) for each in figure.axes[0].collections]
    assert sum(map(len, drawn)) == 5
