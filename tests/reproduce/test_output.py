"""Figures of a study: bands stay where values can be."""

from __future__ import annotations

import numpy as np
import pytest

from fedexp.analysis.plots import new_figure
from fedexp.reproduce.output import draw_panel
from tests.helpers.outcomes import outcome


@pytest.mark.parametrize(
    ("metric", "values", "low", "high"),
    [
        ("server_lr", [(1.0, 1.0), (1.0, 5.0), (3.0, 9.0)], 1.0, 20.0),
        ("test_accuracy", [(0.0, 0.9), (0.0, 1.0), (0.4, 1.0)], 0.0, 1.0),
        ("train_loss", [(1.0, 0.1), (9.0, 0.2), (1.0, 3.0)], 1e-9, 20.0),
    ],
)
def test_bands_stay_within_the_bounds_of_a_metric(
    metric: str, values: list[tuple[float, float]], low: float, high: float
) -> None:
    runs = [outcome("fedexp", seed, [None, None]) for seed in range(3)]
    for run, own in zip(runs, values, strict=True):
        for row, value in zip(run.rows, own, strict=True):
            row[metric] = value
    _, (axes,) = new_figure(1)
    draw_panel(axes, {"fedexp": runs}, metric)
    edges = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1]
    assert edges.min() >= low
    assert edges.max() <= high


def test_readings_of_eps_have_the_colour_of_their_algorithm_and_other_lines() -> None:
    names = ["fedexp", "fedexp (participants x eps)", "fedavg"]
    _, (axes,) = new_figure(1)
    draw_panel(axes, {name: [outcome(name, 0, [0.1, 0.2])] for name in names}, "test_accuracy")
    first, second, other = axes.get_lines()
    assert first.get_color() == second.get_color() != other.get_color()
    styles = [line.get_linestyle() for line in (first, second, other)]
    assert styles == ["-", "--", "-"]
