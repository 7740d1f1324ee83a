"""Comparisons: what the table says, and that processes give what one process gives."""

from __future__ import annotations

import numpy as np
import pytest

import fedexp as fx
from fedexp.analysis.plots import comparison_figure, mean_and_spread
from fedexp.analysis.summary import rounds_to, summarise
from fedexp.analysis.tables import comparison_numbers, comparison_table, render_table, text_table
from fedexp.reproduce.toy import LAST, MEAN, PLAIN, toy_figure, toy_paths
from fedexp.runs.options import build_task
from fedexp.runs.pool import run_all
from fedexp.runs.spec import Outcome, Spec

SMALL = (("task.clients", "4"), ("task.rows", "3"), ("task.dim", "20"))


def outcome(name: str, seed: int, curve: list[float], diverged_at: int | None = None) -> Outcome:
    rows = [{"test_accuracy": value} for value in curve]
    return Outcome(Spec("digits", name, seed), rows, 1.0, diverged_at)


def test_summary_of_rounds_speed_up_and_spread() -> None:
    runs = [
        outcome("fedavg", 0, [0.1, 0.2, 0.6, 0.7]),
        outcome("fedavg", 1, [0.1, 0.2, 0.3, 0.9]),
        outcome("fedexp", 0, [0.1, 0.6, 0.7, 0.8]),
        outcome("fedexp", 1, [0.6, 0.6, 0.7, 0.6]),
    ]
    fedavg, fedexp = summarise(runs, "test_accuracy", 0.6)
    assert (fedavg.rounds, fedexp.rounds) == ([3, 4], [2, 1])
    assert fedexp.speedup == pytest.approx(3.5 / 1.5)
    assert fedexp.finals == [0.8, 0.6]
    headers, cells = comparison_table([fedavg, fedexp], "test_accuracy", 0.6, 4)
    assert headers[1] == "rounds to 60.00%"
    assert cells[1] == ["fedexp", "1.5 ± 0.7", "2.33x", "70.00% ± 14.14%"]
    assert "fedexp" in text_table(headers, cells)


def test_a_target_is_reached_to_within_rounding() -> None:
    live, archived = sum([0.09] * 8), 0.72
    assert live < archived
    for value in (live, archived):
        assert rounds_to(np.array([0.5, value]), 0.72, higher=True) == 2
    assert rounds_to(np.array([0.5, 0.7199]), 0.72, higher=True) is None
    assert rounds_to(np.array([1.0, 3e-12, 1e-12]), 1e-12, higher=False) == 3
    stopping = Spec("digits", "fedexp", stop_at=0.72).prepare()
    assert stopping.reached({"test_accuracy": live})
    assert not stopping.reached({"test_accuracy": 0.7199})


def test_a_seed_that_never_arrives_gives_no_flattering_mean() -> None:
    runs = [
        outcome("fedavg", 0, [0.1, 0.2]),
        outcome("fedavg", 1, [0.1, 0.7]),
        outcome("fedexp", 0, [0.6, 0.7]),
        outcome("fedexp", 1, [0.6, 0.7]),
    ]
    fedavg, fedexp = summarise(runs, "test_accuracy", 0.6)
    assert fedavg.mean_rounds is None
    assert fedavg.speedup is None
    assert (fedexp.speedup, fedexp.at_least) == (2.0, True)  # (2 + at least 2) / 2 rounds over 1
    _, cells = comparison_table([fedavg, fedexp], "test_accuracy", 0.6, 2)
    assert cells[0][1:3] == [">2 (1/2 seeds)", "-"]
    assert cells[1][2] == ">2.00x"


def test_fedavg_counts_for_the_rounds_that_it_had_itself() -> None:
    runs = [outcome("fedavg", 0, [0.1, 0.2]), outcome("fedexp", 0, [0.6, 0.7, 0.7, 0.7])]
    _, fedexp = summarise(runs, "test_accuracy", 0.6)
    assert (fedexp.speedup, fedexp.at_least) == (2.0, True)  # of rounds 3 and 4 nothing is known


def test_without_a_target_nobody_missed_it() -> None:
    lines = summarise([outcome("fedexp", 0, [0.1, 0.2])], "test_accuracy", None)
    headers, cells = comparison_table(lines, "test_accuracy", None, 2, smooth=20)
    assert headers[1::2] == ["rounds to target", "final test accuracy (last 20 rounds)"]
    assert cells == [["fedexp", "-", "-", "20.00%"]]


def test_smoothing_averages_the_end_over_rounds_and_leaves_the_rounds_to_target() -> None:
    runs = [
        outcome("fedexp", 0, [0.1, 0.9, 0.5, 0.7]),
        outcome("fedexp", 1, [0.1, 0.2, 0.9, 0.6]),
    ]
    (line,) = summarise(runs, "test_accuracy", 0.8, smooth=2)
    assert line.rounds == [2, 3]  # a single round counts, as in the paper's Table 1
    assert line.finals == pytest.approx([0.6, 0.75])
    assert line.spread == pytest.approx(np.std([0.5, 0.7, 0.9, 0.6], ddof=1))
    (one,) = summarise(runs[:1], "test_accuracy", 0.8)
    assert (one.finals, one.spread) == ([0.7], None)


def test_smoothing_counts_rounds_not_evaluations() -> None:
    rare = outcome("fedexp", 0, [])
    rare.rows.extend({"test_accuracy": v} for v in (0.1, None, 0.4, None, 0.8))
    assert summarise([rare], "test_accuracy", None, smooth=3)[0].finals == pytest.approx([0.6])
    assert summarise([rare], "test_accuracy", None, smooth=20)[0].finals == pytest.approx([1.3 / 3])


def test_curves_are_pooled_over_seeds_and_the_window() -> None:
    curves = [np.array([1.0, 2.0, 6.0]), np.array([3.0, 4.0, 8.0])]
    rounds, mean, spread = mean_and_spread(curves, smooth=2)
    assert rounds.tolist() == [1, 2, 3]
    assert mean == pytest.approx([2, 2.5, 5])
    assert spread[2] == pytest.approx(np.std([2, 6, 4, 8], ddof=1))
    sparse = np.array([np.nan, 2.0, np.nan, 6.0])
    rounds, mean, spread = mean_and_spread([sparse], smooth=3)
    assert (rounds.tolist(), mean.tolist()) == ([2, 4], [2.0, 4.0])


def test_numbers_for_programs_and_cells_for_people() -> None:
    runs = [outcome("fedavg", s, [0.1, 0.7]) for s in (0, 1)]
    runs += [outcome("a_b", 0, [0.9, 0.9]), outcome("a_b", 1, [0.9, 0.9], diverged_at=3)]
    lines = summarise(runs, "test_accuracy", 0.6)
    headers, cells = comparison_numbers(lines)
    by_name = [dict(zip(headers, row, strict=True)) for row in cells]
    assert (by_name[0]["rounds_mean"], by_name[0]["final_std"]) == ("2.0", "0.0")
    assert (by_name[1]["speedup"], by_name[1]["final_mean"]) == ("2.0", "")
    table = comparison_table(lines, "test_accuracy", 0.6, 2)
    assert "a\\_b & 1.0 $\\pm$ 0.0" in render_table("latex", *table)
    assert "| 70.00% ± 0.00% |" in render_table("markdown", *table)
    with pytest.raises(fx.UsageError, match="did you mean markdown"):
        render_table("markdwon", *table)


def test_a_diverged_run_is_told() -> None:
    (line,) = summarise([outcome("fedavg", 0, [0.9], diverged_at=2)], "test_accuracy", 0.95)
    assert np.isnan(line.finals).all()


def test_losses_are_reached_from_above() -> None:
    run = Outcome(Spec("synthetic", "fedavg"), [{"train_loss": v} for v in (1, 0.1, 0.01)], 1.0)
    (line,) = summarise([run], "train_loss", 0.1)
    assert line.rounds == [2]


def untimed(outcome: Outcome) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in outcome.rows]


def test_processes_give_the_same_rows_in_the_same_order() -> None:
    specs = [
        Spec("synthetic", a, s, 3, options=SMALL) for a in ("fedexp", "scaffold") for s in (0, 1)
    ]
    seen: list[tuple[Spec, int]] = []
    one = run_all(specs, 1, lambda spec, row: None)
    two = run_all(specs, 2, lambda spec, row: seen.append((spec, row["round"])))
    assert [o.spec for o in two] == specs
    assert [untimed(o) for o in one] == [untimed(o) for o in two]
    assert sorted(seen, key=str) == sorted(
        [(spec, r) for spec in specs for r in (1, 2, 3)], key=str
    )


def test_seeds_change_the_data() -> None:
    zero, one = (build_task("synthetic", {"dim": "20"}, seed) for seed in (0, 1))
    assert not np.array_equal(zero.train.fields["x"], one.train.fields["x"])
    fixed = build_task("synthetic", {"dim": "20", "seed": "0"}, 1)
    assert np.array_equal(zero.train.fields["x"], fixed.train.fields["x"])


def test_unknown_task_options_are_told() -> None:
    with pytest.raises(fx.UsageError, match=r"did you mean task\.clients"):
        build_task("synthetic", {"client": "3"})


def test_the_comparison_figure_shows_every_algorithm() -> None:
    runs = [outcome(a, s, [0.1, 0.5, 0.6]) for a in ("fedavg", "fedexp") for s in (0, 1)]
    runs.append(outcome("fedadam", 0, [], diverged_at=1))
    figure = comparison_figure(runs, "test_accuracy", 0.5, "title")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["fedavg", "fedexp"]


def test_the_toy_paths_are_those_the_paper_describes() -> None:
    """Fig. 2: distance falls in every round, the loss goes up and down, the mean is lower."""
    paths = toy_paths((0.0, 0.0), 30)
    distance = np.array(paths[LAST].sq_distance)
    assert (np.diff(distance) < 0).all()
    assert (np.diff(paths[LAST].loss) > 0).sum() >= 10
    assert np.mean(np.log(paths[MEAN].loss[2:])) < np.mean(np.log(paths[LAST].loss[2:]))
    assert distance[-1] < 1e-3 * paths[PLAIN].sq_distance[-1]
    assert len(toy_figure(paths).axes) == 3


@pytest.mark.parametrize("algorithms", [("fedexp", "nothing"), ("nothing", "fedexp")], ids=str)
def test_a_failing_run_ends_the_others_at_once(algorithms: tuple[str, ...]) -> None:
    specs = [Spec("synthetic", name, rounds=5000) for name in algorithms]
    seen: list[int] = []
    with pytest.raises(fx.UsageError, match="unknown algorithm"):
        run_all(specs, 2, lambda spec, row: seen.append(row["round"]))
    assert 5000 not in seen
