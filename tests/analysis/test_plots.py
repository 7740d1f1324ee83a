"""Figures: titles, and the figure of a comparison."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fedexp.algorithms import ALGORITHMS
from fedexp.analysis.plots import COLOURS, comparison_figure, entitle, new_figure, styles
from tests.helpers.outcomes import outcome

# How linear RGB is seen without long-wave or middle-wave cones (Machado et al., 2009).
PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
XYZ = np.array([[0.412, 0.358, 0.180], [0.213, 0.715, 0.072], [0.019, 0.119, 0.950]])


def seen(colour: str, vision: Any) -> Any:
    """Return a colour in CIELAB, as an eye with these cones sees it."""
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(vision @ linear, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("panels", [1, 3])
def test_a_title_stays_within_its_figure(panels: int) -> None:
    figure, _ = new_figure(panels)
    entitle(figure, "Figures 15 to 17: server momentum with extrapolation (shrunk)")
    figure.draw_without_rendering()
    (title,) = figure.texts
    box = title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert ("\n" in figure.get_suptitle()) == (panels == 1)


def test_the_comparison_figure_shows_every_algorithm() -> None:
    runs = [outcome(a, s, [0.1, 0.5, 0.6]) for a in ("fedavg", "fedexp") for s in (0, 1)]
    runs.append(outcome("fedadam", 0, [], diverged_at=1))
    figure = comparison_figure(runs, "test_accuracy", 0.5, "title")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["fedavg", "fedexp"]


def test_the_comparison_figure_shows_every_target() -> None:
    runs = [outcome("fedexp", 0, [0.1, 0.6])]
    figure = comparison_figure(runs, "test_accuracy", 0.4, "title", further=[0.5, 0.55])
    _, *targets = figure.axes[0].lines
    assert [list(np.unique(line.get_ydata())) for line in targets] == [[0.4], [0.5], [0.55]]


def test_algorithms_of_the_users_own_look_different() -> None:
    names = ["fedavg", "fedexp", *"abcdef"]
    found = styles(names)
    assert (found["fedexp"].light, found["fedexp"].dark) == COLOURS["fedexp"]
    for shade in ("light", "dark"):
        colours = [getattr(found[name], shade) for name in names]
        for vision in (np.eye(3), PROTANOPIA, DEUTERANOPIA):
            points = [seen(colour, vision) for colour in colours]
            apart = min(np.linalg.norm(a - b) for a, b in combinations(points, 2))
            assert apart > 12  # of which about 2 can be told apart
    assert len({found[name].dash for name in "abcdef"}) == 6


def test_every_algorithm_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(ALGORITHMS)
    for colours in zip(*COLOURS.values(), strict=True):
        points = [seen(colour, np.eye(3)) for colour in colours]
        assert min(np.linalg.norm(a - b) for a, b in combinations(points, 2)) > 12


def test_bands_of_figures_stay_within_bounds() -> None:
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(3):
        run = outcome("fedexp", seed, list(rng.uniform(0.9, 1, 20)))
        for row in run.rows:
            row |= {"server_lr": max(1.0, rng.normal(1, 1)), "train_loss": rng.exponential()}
        runs.append(run)
    accuracy, loss, step = comparison_figure(runs, "test_accuracy", None, "title").axes

    def band(axes: Any) -> Any:
        return axes.collections[0].get_paths()[0].vertices[:, 1]

    assert band(accuracy).max() <= 1
    assert band(loss).min() > 0
    assert band(step).min() >= 1


def test_a_short_seed_does_not_end_the_line_of_its_algorithm() -> None:
    runs = [outcome("fedexp", 0, [0.1, 0.5, 0.6, 0.7]), outcome("fedexp", 1, [0.1])]
    axes = comparison_figure(runs, "test_accuracy", None, "title").axes[0]
    pale = axes.lines[0]
    assert np.array_equal(pale.get_xdata(), [1, 2, 3, 4])


def test_a_run_that_diverged_does_not_flatten_the_others() -> None:
    good, gone = outcome("fedexp", 0, [0.5] * 4), outcome("fedadam", 0, [0.5] * 4, diverged_at=4)
    for at in range(4):
        good.rows[at]["train_loss"], gone.rows[at]["train_loss"] = 2 - at / 4, 10.0 ** (9 * at)
    axes = comparison_figure([good, gone], "test_accuracy", None, "title").axes[1]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[1] < 3
