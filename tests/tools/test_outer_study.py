"""The study of outer rules: what is stored, what is measured, and the verdicts of its page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tools.outer_study import report
from tools.outer_study.measures import Curves, best_step, load, rank_correlation, store
from tools.outer_study.protocol import (
    BASE,
    CELLS,
    CONSTANTS,
    RULES,
    SEEDS,
    STEPS,
    Cell,
    Key,
    judged,
    tuning,
)


def made(gain: float, best: float = 1.3) -> dict[Key, Curves]:
    """Return all runs: a constant step loses its squared distance to the best one in the logarithm,
    FedExP has `gain` less than step 1, and inner learning rates other than 2e-3 lose 1."""
    runs = {}
    for key in [*tuning(), *judged(list(RULES), 2e-3)]:
        step = best * key.cell.workers**0.1
        loss = 2.0
        if key.rule.startswith("step"):
            loss += math.log(float(key.rule[5:]) / step) ** 2
        elif key.rule.startswith("fedexp"):
            loss += math.log(1 / step) ** 2 - gain
        loss += (key.local_lr != 2e-3) + (key.rule == "fedadam 0.03")
        runs[key] = Curves((3.0, loss), (step, step), "CPU")
    return runs


def test_the_best_step_is_the_lowest_point_of_a_parabola() -> None:
    for best in (0.8, 1.1, 1.6):
        cell = Cell(8, 32, "random")
        found = best_step(made(0.0, best / 8**0.1), cell, 2e-3, 0)
        assert found == pytest.approx(best, rel=1e-9)
    assert best_step(made(0.0, 9.0), BASE[0], 2e-3, 0) == CONSTANTS[-1]


def test_ranks_by_hand() -> None:
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert rank_correlation([(1, 1), (2, 1), (3, 5), (4, 9)]) == pytest.approx(0.948683298051)


def test_runs_are_stored_and_read(tmp_path: Path) -> None:
    runs = made(0.1)
    store(tmp_path, runs)
    again = load(tmp_path)
    assert again.keys() == runs.keys()
    for key, run in runs.items():
        assert again[key].final == pytest.approx(run.final, rel=1e-5)
        assert again[key].mean_step == pytest.approx(run.mean_step, rel=1e-5)


def test_rows_of_a_run_are_stored_without_those_that_were_not_evaluated() -> None:
    rows: list[dict[str, float | None]] = [
        {"server_lr": 1.0, "test_loss": None},
        {"server_lr": 4.0, "test_loss": 2.345678},
    ]
    curves = Curves.of(rows, "CPU")
    assert (curves.losses, curves.steps, curves.mean_step) == ((2.3457,), (1.0, 4.0), 2.0)


@pytest.mark.parametrize(("gain", "answer"), [(0.05, "yes"), (-0.05, "no")])
def test_verdicts_follow_from_the_runs(gain: float, answer: str, tmp_path: Path) -> None:
    store(tmp_path, made(gain))
    blocks = report.blocks(tmp_path)
    over_averaging, *_, predicts = blocks["outer-answers"].splitlines()
    assert over_averaging.endswith(f"**{answer}**.")
    assert predicts.endswith(": 1.00: **yes**.")
    assert blocks["outer-cells"].count("\n") == 1 + len(CELLS)
    assert "fedadam 0.003" in blocks["outer-base"]
    assert "fedadam 0.03" not in blocks["outer-base"]


def test_without_all_runs_the_page_says_so(tmp_path: Path) -> None:
    runs = made(0.0)
    del runs[Key(BASE[1], "nesterov", 2e-3, SEEDS[-1])]
    store(tmp_path, runs)
    blocks = report.blocks(tmp_path)
    assert blocks.pop("outer-tuning").count("\n") == 1 + len(RULES)
    (left,) = set(blocks.values())
    assert left == f"Not complete: {len(runs)} runs are stored."
    assert set(report.blocks(tmp_path / "none").values()) == {"Not complete: 0 runs are stored."}
    assert report.figure(tmp_path) is None


def test_runs_have_equal_inner_steps_and_evaluate_their_end() -> None:
    for cell in CELLS:
        run = Key(cell, "fedexp", 2e-3, 0).experiment()
        assert run.rounds is not None
        assert run.rounds * cell.inner_steps == STEPS
        assert run.algorithm != RULES["step 1"]()
