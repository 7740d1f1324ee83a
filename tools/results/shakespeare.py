"""Shakespeare: its long runs, for docs/tasks.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedexp.analysis.plots import entitle, label, new_figure
from fedexp.analysis.summary import Curve
from fedexp.runs import StoredRun
from tools.grid import crossings
from tools.results.archive import Archive
from tools.results.format import NO_RUNS, algorithm_name, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "figure.svg"
TARGETS = (0.45, 0.50, 0.55)


def runs_table(archive: Archive) -> str:
    """Return rounds to several test accuracies, and the last one, of the long runs."""
    rows = []
    for name, run in long_runs(archive):
        curve = run.outcome().curve("test_accuracy")
        hits = [_crossings(curve, target) for target in TARGETS]
        last, loss = run.rows[-1]["test_accuracy"], run.rows[-1]["test_loss"]
        rows.append([name, *hits, f"{100 * last:.2f} %", f"{loss:.3f}"])
    if not rows:
        return NO_RUNS
    targets = (f"rounds to {100 * target:.0f} %" for target in TARGETS)
    return table(["run", *targets, "last test accuracy", "last test loss"], rows)


def figure(archive: Archive) -> Figure | None:
    """Draw the test accuracy and the server step size of the long runs."""
    runs = list(long_runs(archive))
    if not runs:
        return None
    drawing, (left, right) = new_figure(2)
    for name, run in runs:
        curve = run.outcome().curve("test_accuracy")
        at = np.flatnonzero(~np.isnan(curve))
        left.plot(at + 1, 100 * curve[at], label=name, linewidth=1.4)
        steps = [row["server_lr"] for row in run.rows]
        right.plot(np.arange(len(steps)) + 1, steps, linewidth=0.8)
    label(left, "round", "test accuracy (%)")
    label(right, "round", "server step size")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    entitle(drawing, "Shakespeare by role, LSTM, 10 of 1,109 roles per round, seed 0")
    return drawing


def long_runs(archive: Archive) -> Iterator[tuple[str, StoredRun]]:
    """Yield the archived runs with a name that states their values."""
    found = [run for run in archive.runs if run.spec["task"] == "shakespeare"]
    for run in sorted(found, key=lambda run: (run.spec["algorithm"], str(run.spec["set"]))):
        settings = run.spec["set"]
        server = next(name for name in settings if name.startswith("server."))
        values = f"client step {float(settings['local.lr']):.3g}, "
        values += f"{server}={float(settings[server]):.3g}"
        yield f"{algorithm_name(run.spec['algorithm'])}, {values}", run


def _crossings(curve: Curve, target: float) -> str:
    first, smooth = crossings(curve, target)
    return f"{first or 'not reached'} ({smooth or 'not reached'})"
