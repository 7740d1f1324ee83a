"""Diagnostics appear once, when due, and not with the defaults of the tasks."""

from __future__ import annotations

import csv
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedexp as fx
from fedexp.cli.progress import FIRST_ROUNDS, Diagnostics, LiveBar

RUNS = Path(__file__).parents[2] / "results" / "runs"


def seen(rows: list[dict[str, Any]], **options: Any) -> list[tuple[int, str]]:
    """The lines, with the number of rows seen when they came."""
    diagnostics = Diagnostics(options)
    return [(n, line) for n, row in enumerate(rows, 1) for line in diagnostics.see(row)]


def alike(share: float, diversity: float, clamped: bool, rounds: int = 50) -> list[dict[str, Any]]:
    return [{"eps_share": share, "diversity": diversity, "clamped": float(clamped)}] * rounds


def lines_of(task: str, algorithm: str, rounds: int = FIRST_ROUNDS, cohort: int | None = None,
             **options: Any) -> list[str]:  # fmt: skip
    pairs = {name.replace("__", "."): value for name, value in options.items()}
    settings: Any = {"rounds": rounds, "cohort": cohort, "evaluate_every": 50, "options": pairs}
    return [line for _, line in seen(fx.run(task, algorithm, runs=None, **settings).rows)]


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        (alike(0.9, 6.0, clamped=True), "eps prevents extrapolation in 20 of the first 20 rounds"),
        (alike(0.3, 2.5, clamped=True), "eps prevents extrapolation"),  # 2.5 / 2 * 0.7 < 1
        (
            [*alike(0.1, 6.0, False, 9), *alike(0.7, 6.0, True, 11)],
            "eps prevents extrapolation in 11",
        ),
        (alike(0.0, 1.4, clamped=True), "the clients agree (diversity 1.4,"),
        (alike(0.9, 1.4, clamped=True), "the clients agree"),  # a smaller eps would not help
    ],
)
def test_a_line_appears_once(rows: list[dict[str, Any]], start: str) -> None:
    ((when, line),) = seen(rows)
    assert when == FIRST_ROUNDS
    assert line.startswith(start)
    assert "\n" not in line
    assert ("lower server.eps" in line) == start.startswith("eps")


@pytest.mark.parametrize(
    "rows",
    [
        alike(0.6, 6.0, clamped=False),  # a large share that bounds the step, and no more
        [*alike(0.1, 6.0, False, 10), *alike(0.7, 6.0, True, 10)],
        alike(0.0, 1.4, clamped=False),
        alike(0.9, 6.0, clamped=True, rounds=FIRST_ROUNDS - 1),
        [*alike(0.0, 1.4, clamped=True, rounds=FIRST_ROUNDS - 1), *alike(0.0, 4.0, clamped=False)],
        [*alike(0.1, 6.0, clamped=False, rounds=FIRST_ROUNDS), *alike(0.99, 6.0, clamped=True)],
        [{"server_lr": 1.0, "train_loss": 0.5}] * 50,  # FedAvg
        [{"eps_share": None, "diversity": None}] * 50,  # nobody took part
    ],
)
def test_it_is_silent(rows: list[dict[str, Any]]) -> None:
    assert seen(rows) == []


def test_a_relative_eps_may_have_a_large_share() -> None:
    diagnostics = Diagnostics({"server.eps_mode": "relative"})
    assert not [line for row in alike(0.6, 30.0, clamped=False) for line in diagnostics.see(row)]
    clamped = Diagnostics({"server.eps_mode": "relative"})
    assert [line for row in alike(0.6, 3.0, clamped=True) for line in clamped.see(row)]


def losses(*values: float | None) -> list[dict[str, Any]]:
    common = {"eps_share": 0.1, "diversity": 6.0, "clamped": 0.0, "server_lr": 4.0}
    return [{**common, "round": n, "train_loss": loss} for n, loss in enumerate(values, 1)]


def test_a_loss_that_doubles_is_reported_once() -> None:
    ((when, line),) = seen(losses(3.0, 1.0, None, 1.9, 2.1, 3.4, 0.5, 2.0))
    assert when == 5
    assert line.startswith("the training loss went from 1 back to 2.1 by round 5")
    assert "server.max_step" in line
    assert seen(losses(3.0, 1.0, 1.99, 0.9, 1.79)) == []
    assert seen(losses(3.0, 0.5, 1.4)) == []  # far from where it began
    assert seen([{"round": n, "train_loss": loss} for n, loss in enumerate((1.0, 9.0), 1)]) == []


def test_the_factor_says_how_much_the_clients_must_differ() -> None:
    rows = alike(0.6, 1.5, clamped=True)
    assert "the clients agree" in seen(rows)[0][1]
    assert "lower server.eps" in seen(rows, **{"server.factor": 1.0})[0][1]


@pytest.mark.parametrize(
    ("task", "algorithm"),
    [
        ("digits", "fedexp"),
        ("digits", "scaffold-exp"),
        ("digits-mlp", "fedexp"),
        ("digits-mlp", "fedexp-m"),
        ("synthetic", "fedexp"),
    ],
)
def test_the_values_of_a_task_have_no_diagnostics(task: str, algorithm: str) -> None:
    assert lines_of(task, algorithm) == []


def test_real_runs_that_need_it() -> None:
    (eps,) = lines_of("digits", "fedexp", eps=10)
    assert "lower server.eps" in eps
    (agree,) = lines_of(
        "digits", "fedexp", cohort=2, task__alpha=100, local__batch_size="none", local__lr=0.1
    )
    assert "the clients agree" in agree


def test_archived_runs_of_fedexp() -> None:
    """A note where a smaller eps needs fewer rounds (docs/reproduction-appendix.md), no other."""
    found = set()
    for path in sorted(RUNS.glob("*-fedexp-s*.csv")):
        with path.open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row.get("eps_share")][:FIRST_ROUNDS]
        numbers = [
            {"eps_share": float(row["eps_share"]), "diversity": float(row["diversity"]),
             "clamped": float(row["server_lr"]) <= 1}
            for row in rows
        ]  # fmt: skip
        spec = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))["spec"]
        found |= {(spec["task"], spec["mode"], bool(seen(numbers)))}
    assert {key for key in found if key[2]} == {("cifar10", "authors-code", True)}
    assert {("emnist", "paper", False), ("cifar10", "paper", False)} <= found


class Shown:
    """Stands for the progress bars of rich: records what is beside the bar."""

    def __init__(self) -> None:
        self.numbers: list[str] = []

    def add_task(self, title: str, total: int, numbers: str) -> int:
        return 0

    def update(self, task: int, **fields: Any) -> None:
        self.numbers.append(fields.get("numbers", ""))


def test_the_bar_shows_what_is_waited_for_until_the_first_round() -> None:
    shown = Shown()
    bar, log = LiveBar(shown, "t", 10, "test_f1"), logging.getLogger("fedexp")
    log.addHandler(bar)
    log.setLevel(logging.INFO)
    try:
        records = fx.simulate(fx.tasks.digits(), fx.fedexp(), 1, engine="auto")
        for _ in records:
            pass
        assert shown.numbers[0].startswith("trying an engine: a plain dense classifier")
        bar({"round": 1, "test_f1": 0.5, "train_loss": 2.0})
        log.info("later")
    finally:
        log.removeHandler(bar)
        log.setLevel(logging.NOTSET)
    assert shown.numbers[-1] == "test f1 0.5  loss 2"
