"""Synthetic regression: the first panel of Figure 3, and the server step sizes of Figure 7.

Settings: docs/paper.md#synthetic-problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fedexp.analysis.plots import entitle, label, new_figure
from fedexp.analysis.summary import Curve, numbers
from fedexp.reproduce.accuracy_studies import LOSS, TABLE1_ALGORITHMS, Series, same_arms
from fedexp.reproduce.measures import final_loss, grouped, on_common_seeds, seeds_of
from fedexp.reproduce.output import draw_panel, figure_title
from fedexp.reproduce.published import Column, Line, Table, Value, best, claim, study_fields
from fedexp.reproduce.study import Check, Findings, Plan, Result, Study, check
from fedexp.runs.spec import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONSTANT = "fedavg"  # its constant step size is what Figure 7 compares FedExP's with
STEP, LARGEST = "median server step", "largest server step"
COLUMNS = (Column(LOSS, ""), Column(STEP, ""), Column(LARGEST, ""))
judge = partial(check, "synthetic")


def measure(plan: Plan, results: Sequence[Result]) -> Findings:
    """Return final losses, and FedExP's step sizes compared with the constant one."""
    series = grouped(results)["synthetic"]
    lines = tuple(_line(name, runs) for name, runs in series.items())
    common = on_common_seeds(series)
    checks = (*_loss_checks(common), *_step_checks(common)) if seeds_of(common) else ()
    return Findings(Table(COLUMNS, lines), checks, lambda: _draw(plan, series))


def _line(name: str, runs: Sequence[Outcome]) -> Line:
    steps = _server_steps(runs)
    values = {
        LOSS: final_loss(runs),
        STEP: Value(float(np.median(steps))),
        LARGEST: Value(float(steps.max())),
    }
    return Line("synthetic", name, values)


def _server_steps(runs: Sequence[Outcome]) -> Curve:
    return numbers(*(run.curve("server_lr") for run in runs))


def _loss_checks(series: Series) -> tuple[Check, ...]:
    losses, seeds = {name: final_loss(runs) for name, runs in series.items()}, seeds_of(series)
    others = {name: value for name, value in losses.items() if name != "fedexp"}
    next_best = best(others, lowest=True)
    ours = losses["fedexp"].mean
    if ours is None or next_best is None:
        return tuple(judge(key, None, "diverged", seeds) for key in ("order", "orderwise"))
    theirs = others[next_best].mean
    assert theirs is not None
    known = [name for name, value in losses.items() if value.mean is not None]
    order = " < ".join(sorted(known, key=lambda name: losses[name].mean or 0.0))
    factor = theirs / ours if ours else float("inf")
    enough = factor >= claim("synthetic", "orderwise").threshold
    return (
        judge("order", ours < theirs, order, seeds),
        judge("orderwise", enough, f"{factor:.2g} times {next_best}'s", seeds),
    )


def _step_checks(series: Series) -> tuple[Check, ...]:
    steps, constant = _server_steps(series["fedexp"]), float(_server_steps(series[CONSTANT])[0])
    above, seeds = int((steps > constant).sum()), seeds_of(series)
    seen = f"above {constant:g} in {above} of {len(steps)}, up to {steps.max():.3g}"
    return (
        judge("some", above > 0, seen, seeds),
        judge("not-all", above < len(steps), f"least {steps.min():.3g}", seeds),
    )


def _draw(plan: Plan, series: Series) -> Figure:
    figure, (loss, step) = new_figure(2)
    draw_panel(loss, series, "train_loss")
    label(loss, "round", "training loss", "Figure 3, first panel")
    draw_panel(step, {"fedexp": series["fedexp"]}, "server_lr")
    constant = float(_server_steps(series[CONSTANT])[0])
    text = "FedAvg's and SCAFFOLD's best"
    step.axhline(constant, color="#0072B2", linewidth=1.4, linestyle="--", label=text)
    step.set_ylim(0, 1.3 * float(_server_steps(series["fedexp"]).max()))  # space for the legend
    label(step, "round", r"$\eta_g$", "Figure 7: server step size")
    for panel in (loss, step):
        panel.legend(frameon=False, fontsize=9)
    entitle(figure, figure_title(plan))
    return figure


STUDY = Study(**study_fields("synthetic"), arms=same_arms(*TABLE1_ALGORITHMS), measure=measure)
