"""Figures and notes of a search: every trial is drawn, also those that failed."""

from __future__ import annotations

import numpy as np
import pytest

import fedexp as fx
from fedexp.analysis.plots import new_figure
from fedexp.errors import UsageError
from fedexp.tuning.results import draw_heatmap, tuning_figure
from tests.helpers.tuning import small_tune


def test_a_heat_map_shows_every_number_and_frames_the_chosen() -> None:
    _, (axes,) = new_figure(1)
    cells = np.array([[0.5, 0.25], [np.nan, 0.75]])
    draw_heatmap(axes, [0.01, 0.1], [1.0, 10.0], cells, "train_accuracy", frame=(1, 1))
    assert [text.get_text() for text in axes.texts] == ["50.0", "25.0", "div.", "75.0"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.1"]
    (frame,) = axes.patches
    assert frame.get_xy() == (0.5, 0.5)  # type: ignore[attr-defined]


def test_a_grid_that_diverged_everywhere_can_be_drawn() -> None:
    grid = {"server.lr": [1.0, 2.0], "local.lr": [5.0, 9.0]}
    tuning = small_tune(grid=grid, rounds=30, runs=None)
    figure = tuning_figure(tuning)
    assert [text.get_text() for text in figure.axes[0].texts] == ["div."] * 4
    assert tuning.remarks[0] == "4 of 4 trials diverged"
    with pytest.raises(UsageError, match="no trial has a finite train_loss"):
        _ = tuning.best


def test_a_free_search_is_drawn_as_points() -> None:
    tuning = small_tune(protocol="free", trials=5, runs=None)
    figure = tuning_figure(tuning)
    assert figure.axes[0].get_xscale() == "log"
    drawn = [np.asarray(each.get_offsets()) for each in figure.axes[0].collections]
    assert sum(map(len, drawn)) == 5


def test_the_command_of_an_algorithm_of_python_has_the_unit_of_its_eps() -> None:
    grid = {"eps": [0.2]}
    as_it_is = fx.tune("digits", fx.fedexp(), grid, rounds=3, runs=None)
    assert "--set server.eps=0.2 --set server.eps_mode=relative" in as_it_is.command
    by_name = fx.tune("digits", "fedexp", grid, rounds=3, runs=None)
    assert by_name.command == "fedexp run digits --algorithm fedexp --set server.eps=0.2"


def test_the_command_has_what_decides_the_numbers_besides_options() -> None:
    privacy = fx.privacy.CentralPrivacy(1.0, 1e-5, noise_multiplier=0.01)
    grid = {"lr": [0.5]}
    tuning = fx.tune(
        "digits", "fedavg", grid, seed=2, cohort=4, privacy=privacy, rounds=2, runs=None
    )
    assert tuning.command == (
        "fedexp run digits --algorithm fedavg --seed 2 --cohort 4 "
        "--privacy central:clip=1.0,delta=1e-05,noise_multiplier=0.01,sampling=known "
        "--set server.lr=0.5"
    )
