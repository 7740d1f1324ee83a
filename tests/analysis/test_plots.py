"""What all figures share."""

from __future__ import annotations

import pytest

from fedexp.analysis.plots import entitle, new_figure


@pytest.mark.parametrize("panels", [1, 3])
def test_a_title_stays_within_its_figure(panels: int) -> None:
    figure, _ = new_figure(panels)
    entitle(figure, "Figures 15 to 17: server momentum with extrapolation (shrunk)")
    figure.draw_without_rendering()
    title = figure._suptitle  # type: ignore[attr-defined]
    box = title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert ("\n" in title.get_text()) == (panels == 1)
