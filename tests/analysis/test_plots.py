"""Figures: titles, and the figure of a comparison."""

from __future__ import annotations

import pytest

from fedexp.analysis.plots import comparison_figure, entitle, new_figure
from tests.helpers.outcomes import outcome


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
