"""Published numbers: crossings, intervals, criteria and decisions, from runs with known curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from tools.algorithm_pages import report as pages
from tools.eps_study import measures
from tools.eps_study.curves import Curves, Key
from tools.eps_study.protocol import CANDIDATES, VARIANT_TASKS, Arm, StudyTask
from tools.eps_study.protocol import TASKS as EPS_TASKS
from tools.grid import write_csv
from tools.leaderboard import report as board_report
from tools.leaderboard.measures import Cell
from tools.leaderboard.protocol import ENTRIES, TASKS
from tools.leaderboard.runs import BoardRun, Store
from tools.results import deviations, search, shakespeare, studies, table1
from tools.results.archive import Archive, load_archive

from fedexp.algorithms import ALGORITHMS
from fedexp.engine.contract import probe
from fedexp.engine.state import SimulationState
from fedexp.runs import StoredRun
from fedexp.tasks import digits
from fedexp.tasks.recipe import RECIPES
from tests.helpers.archives import fabricated

RESULTS = Path(__file__).parents[2] / "results"
HITS = {"fedexp": 200, "fedavg": 300, "scaffold": 310, "fedadagrad": 290}


def table1_runs(task: str = "cifar10", seeds: int = 2, **more: Any) -> list[StoredRun]:
    return [
        fabricated("table1", task, name, seed, hit + 10 * seed, **more)
        for name, hit in HITS.items()
        for seed in range(seeds)
    ]


# Table 1 and the criteria -------------------------------------------------------------------------


def test_our_rounds_are_next_to_the_papers() -> None:
    """A series of another mode or reading of eps has its own row, and no part in other rows."""
    released = [
        fabricated("table1", "cifar10", name, 0, hit, mode="authors-code")
        for name, hit in {"fedexp": 200, "fedavg": 250}.items()
    ]
    reading = "fedexp (participants x eps)"
    other = [fabricated("table1", "cifar10", reading, seed, 150) for seed in range(3)]
    archive = Archive((*table1_runs(), *released, *other))
    text = table1.tables(archive)
    printed = "| FedExP (eps as printed) | 205 ± 7.1 | 200, 210 | 220 ± 7.1 | 267 | -23 % | 1.49x "
    assert f"{printed}| 1.62x | 90.00% ± 0.00 |" in text
    assert "| 315 ± 7.1 | 310, 320 | 330 ± 7.1 | 429 | -27 % | 0.97x | 1.01x |" in text
    assert "| FedExP, mode authors-code | 200 | 200 | 215 | - | - | 1.25x |" in text
    assert "FedExP (participants x eps) | 150 ± 0 | 150, 150, 150 |" in text
    rows = [
        "eps as printed | 205 ± 7.1 | 267 | 90.00% ± 0.00 | 1.50 | 1.50 | 25.0% | 2 |",
        "participants x eps | 150 ± 0 | 267 | 90.00% ± 0.00 | 1.50 | 1.50 | 25.0% | 3 |",
        "all of mode authors-code | 200 | 267 | 90.00% | 1.50 | 1.50 | 25.0% | 1 |",
    ]
    readings = deviations.eps_readings(archive).splitlines()[2:]
    assert readings == [f"| CIFAR-10 | {row}" for row in rows]


def test_a_speed_up_over_five_seeds_has_its_interval_by_both_crossings() -> None:
    """Ratios are 30/20, ..., 34/24, and 32/22, ..., 36/26 by the smoothed crossing."""
    archive = Archive(tuple(table1_runs("emnist", seeds=5, clients=294)))
    both = "320/220: 1.45x [1.42, 1.50] | 1.76x | 340/240: 1.42x [1.38, 1.45] |"
    assert f"EMNIST 84 %, as printed, 5 seeds | {both}" in table1.readme(archive)
    assert "**1.45** [1.42, 1.50], smoothed 1.42x [1.38, 1.45]" in table1.headline(archive)
    four = Archive(tuple(table1_runs("emnist", seeds=4, clients=294)))
    assert "[" not in table1.readme(four).replace("[every", "")
    stored = list(archive.runs)
    stored[4] = fabricated("table1", "emnist", "fedexp", 4, None, 0.5, clients=294)
    missed = table1.readme(Archive(tuple(stored)))
    assert ">272 (4/5 seeds)" in missed
    assert "[" not in missed.replace("[every", "")


def test_seeds_that_miss_the_target_or_diverge_are_counted() -> None:
    stored = table1_runs("emnist", clients=294)
    at = next(i for i, run in enumerate(stored) if run.spec["algorithm"] == "fedavg")
    stored[at] = fabricated("table1", "emnist", "fedavg", 0, None, clients=294)
    text = table1.headline(Archive(tuple(stored)))
    assert "FedAvg more than 405 rounds (1/2 seeds reached it): a speed-up of **>1.98**" in text
    result = {**(stored[at].result or {}), "status": "diverged", "diverged_at": 30}
    stored[at] = replace(stored[at], rows=stored[at].rows[:29], result=result)
    table = table1.tables(Archive(tuple(stored)))
    assert "| FedAvg | >405 (1/2 seeds) | diverged, 310 |" in table
    assert "| >1.98x | 1.76x |" in table


def test_only_judgements_that_a_test_can_tell_are_counted() -> None:
    def head(runs: list[StoredRun]) -> str:
        return studies.disagreements(Archive(tuple(runs))).partition("All criteria")[0]

    five = table1_runs("emnist", seeds=5, clients=294)
    assert "Of these 2 are significant" in head(five)
    assert "2 agree with the paper and 0 do not" in head(five)
    assert "0 of 4 judgements" in head(table1_runs("emnist", seeds=4, clients=294))
    uneven = [  # means of 220 and 280 rounds, as far apart as the seeds of one algorithm
        fabricated("table1", "emnist", name, seed, hit + step * (seed - 2), clients=294)
        for name, (hit, step) in {"fedexp": (220, 80), "fedadagrad": (280, -30)}.items()
        for seed in range(5)
    ]
    rest = [run for run in five if run.spec["algorithm"] in ("fedavg", "scaffold")]
    assert "Of these 0 are significant" in head(uneven + rest)
    close = studies.verdicts(Archive((*uneven, *rest))).split("without significance")[1]
    assert "FedExP needs the fewest rounds (Table 1): **yes** over 5 seeds" in close


def test_extrapolated_rounds_by_reading_of_eps() -> None:
    """With norms 0.07 and 0.02 the step is above 1 for an added eps below 0.015."""
    run = fabricated("table1", "cifar10", "fedexp")
    rows = [{**row, "mean_sq_norm": 0.07, "sq_norm_of_mean": 0.02} for row in run.rows]
    text = deviations.extrapolated_rounds(Archive((replace(run, rows=rows),)))
    # 20 x 1e-3 x 0.996004^t is below 0.015 from t = 72 on, 20 x 10^-2.5 from t = 360
    assert [line.split(" | ")[2:] for line in text.splitlines() if "mode paper" in line] == [
        ["eps as printed", "100%", "100%", "100%", "0%", "0% |"],
        ["participants x eps", "0%", "0%", "0%", "0%", "0% |"],
        ["participants x decaying eps", "86%", "28%", "0%", "0%", "0% |"],
    ]


# Searches -----------------------------------------------------------------------------------------


def test_tuned_runs_are_those_with_the_best_values(tmp_path: Path) -> None:
    scores = {0.01: 0.3, 10**-0.5: 0.5, 1.0: 0.0}
    options = {"fedexp": "server.eps", "fedavg": "server.lr"}
    lines = [
        (name, lr, o, 0.1, score) for name, o in options.items() for lr, score in scores.items()
    ]
    write_csv(tmp_path / search.SEARCH, (*search.Trial._fields[:4], "train_accuracy"), lines)
    best = search.best_trials(search.load_search(tmp_path))
    assert {n: t.local_lr for n, t in best.items()} == dict.fromkeys(options, 10**-0.5)
    row = "| FedExP | server.eps=0.1 | 30.0 % | **50.0 %** | diverged |"
    assert row in search.search_table(tmp_path)

    def tuned(name: str, seed: int, hit: int, **changed: Any) -> StoredRun:
        run = fabricated("table1", "emnist", name, seed, hit, clients=294)
        values = {"local.lr": 10**-0.5, options[name]: 0.1}
        own = {"options": values, "changed": [options[name]], **changed}
        return replace(run, spec={**run.spec, **own})

    runs = [
        *(tuned("fedexp", seed, 50) for seed in range(2)),
        *(tuned("fedavg", seed, 100) for seed in range(2)),
        tuned("fedexp", 2, 10, changed=["server.eps_mode"]),
        tuned("fedexp", 3, 10, rounds=50),
        tuned("fedexp", 4, 10, options={"local.lr": 0.1, "server.eps": 0.1}),
    ]
    table = search.tuned_table(Archive(tuple(runs)), tmp_path).splitlines()
    values = "client step 0.316, server.eps=0.1"
    assert table[2] == f"| FedExP | {values} | 50 ± 0 | 70 ± 0 | 2.00x | 90.00% ± 0.00 | 2 |"
    assert len(table) == 4


def test_the_shakespeare_recipe_and_its_table_are_those_of_the_stored_runs() -> None:
    best = search.best_trials(search.load_search(RESULTS / "shakespeare"))
    tuned = RECIPES["shakespeare"]["tuned"]
    assert set(best) == {"fedavg", "fedexp", "scaffold", "fedadagrad", "fedadam"}
    for name, trial in best.items():
        assert tuned[name]["local.lr"] == pytest.approx(trial.local_lr, rel=1e-5)
        assert tuned[name][trial.option] == pytest.approx(trial.value, rel=1e-5)
    archive = load_archive(RESULTS)
    lines = shakespeare.runs_table(archive).splitlines()[2:]
    runs = [run for run in archive.runs if run.spec["task"] == "shakespeare"]
    assert len(lines) == len(runs) == 3
    for run in runs:
        curve = {row["round"]: row["test_accuracy"] for row in run.rows}
        reached = [t for t, value in curve.items() if value is not None and value >= 0.55]
        last = f"{100 * run.rows[-1]['test_accuracy']:.2f} %"
        (line,) = [line for line in lines if last in line]
        assert f"| {min(reached)} (" in line


# The leaderboard ----------------------------------------------------------------------------------


def board_cell(*curves: list[float]) -> Cell:
    """Return made-up runs of FedExP on digits, one per curve."""
    entry = ENTRIES["fedexp"]
    point = entry.points("digits")[0]
    made = [
        BoardRun("fedexp", seed, point, tuple(values), bytes_up=100, bytes_down=300)
        for seed, values in enumerate(curves)
    ]
    return Cell("digits", entry, tuple(made))


def test_a_target_that_a_seed_misses_has_no_mean() -> None:
    rising = [0.1] * 9 + [0.93] * 141
    late = [0.1] * 19 + [0.95] * 131
    cell = board_cell(rising, late)
    assert cell.crossings(0, "first") == [10, 20]
    assert cell.crossings(0) == [14, 24]  # the mean of five evaluations
    assert (cell.rounds(0), cell.rounds(1)) == (19, None)
    assert cell.final == pytest.approx(0.94)
    assert cell.spread == pytest.approx(stdev([0.93, 0.95]))
    assert cell.bytes_to_target == 19 * 400
    diverged = board_cell(rising, late[:100])
    assert diverged.final is None
    assert diverged.rounds(0) == 19
    text = board_report.tables({("digits", "fedexp"): cell})
    assert "| FedExP, recommended | 19 (15) | 1 of 2 (1 of 2) | 94.00 ± 1.41 % |" in text
    assert "1 of 2 diverged" in board_report.tables({("digits", "fedexp"): diverged})


def test_the_page_agrees_with_the_stored_curves() -> None:
    """Recompute every row of the digits table from the CSV files, without `measures`."""
    page = (RESULTS.parent / "docs" / "leaderboard.md").read_text()
    section = page.partition("### digits (MLP)")[2].partition("###")[0]
    lines = {line.split("|")[1].strip(): line for line in section.splitlines()[4:] if line}
    stored = Store.load("digits", RESULTS / "leaderboard").runs
    for entry in ENTRIES.values():
        curves = [run.values for run in stored if run.row == entry.name]
        for at, target in enumerate(TASKS["digits"].targets):
            first = [next((k + 1 for k, v in enumerate(c) if v >= target), None) for c in curves]
            smooth = [
                next((k for k in range(5, len(c) + 1) if mean(c[k - 5 : k]) >= target), None)
                for c in curves
            ]
            reached = [[n for n in rounds if n is not None] for rounds in (smooth, first)]
            counts = [f"{len(rounds)} of {len(curves)}" for rounds in reached]
            expected = f"{counts[0]} ({counts[1]})"
            if all(len(rounds) == len(curves) for rounds in reached):
                expected = f"{mean(reached[0]):.0f} ({mean(reached[1]):.0f})"
            assert lines[entry.title].split("|")[2 + at].strip() == expected
        if all(len(curve) == TASKS["digits"].rounds for curve in curves):
            final = 100 * mean(mean(curve[-5:]) for curve in curves)
            assert lines[entry.title].split("|")[4].strip().startswith(f"{final:.2f} ±")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_bytes_of_the_table_are_those_of_records(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    state = SimulationState.initial(digits(), algorithm, 0)
    d, counted = state.params.numel(), []
    for line in pages.state(name).splitlines()[2:4]:
        terms = line.split("|")[2].split("+")
        parts = [term.strip().partition("d") for term in terms]
        counted.append(sum(int(n or 1) * (d if unit else 1) for n, unit, _ in parts))
    contract = probe(algorithm, state)
    assert counted[1] * 4 == contract.bytes_down
    assert 0 <= contract.bytes_up - counted[0] * 4 <= 4 * 2  # single numbers may have 8 bytes


# The study of relative eps ------------------------------------------------------------------------


def reaching(task: StudyTask, evaluation: int | None) -> Curves:
    """Return curves that are at the target from this evaluation on."""
    ends = task.budget // task.evaluate_every
    good = task.metric.endswith("accuracy")
    at = ends if evaluation is None else evaluation
    values = [0.0 if good else 1.0] * (at - 1) + [1.0 if good else 0.0] * (ends - at + 1)
    return Curves(tuple(values[: min(ends, at + 4)]) if evaluation else tuple(values[:-1]), (), "x")


def eps_runs(hits: Mapping[Arm, int | None], names: list[str]) -> dict[Key, Curves]:
    """Return the same evaluations to target in every cell of some tasks, FedAvg's being 20."""
    constants = [arm.eps for arm in hits if arm.kind == "relative"]
    return {
        Key(cell, seed, arm): reaching(EPS_TASKS[name], hits.get(arm, 20))
        for name in names
        for cell in EPS_TASKS[name].cells
        for arm in EPS_TASKS[name].arms(cell, constants)
        for seed in EPS_TASKS[name].seeds
    }


def candidates(hits: Mapping[float, int]) -> dict[Arm, int | None]:
    return {Arm("relative", c): hits.get(c, 30) for c in CANDIDATES}


def test_the_constant_with_the_least_loss_is_selected() -> None:
    names = measures.selection_tasks()
    store = eps_runs(candidates({0.05: 12, 0.2: 10}) | {Arm("absolute", 0.01): 8}, names)
    assert measures.selected(store) == 0.2
    cells = measures.task_cells(store, ["digits"], "first")
    assert [cell.oracle for cell in cells] == [Arm("absolute", 0.01)] * 6
    assert measures.to_oracle(cells, Arm("relative", 0.2)) == pytest.approx(10 / 8)
    assert measures.to_fedavg(cells, Arm("relative", 0.2)) == pytest.approx(10 / 20)
    tie = eps_runs(candidates({0.05: 10, 0.1: 10}), names)
    assert measures.selected(tie) == 0.1  # the larger
    networks = [name for name in names if name != measures.INTERPOLATES]
    both = eps_runs(candidates({0.05: 10, 0.01: 11}) | {Arm("absolute", 0.0): 10}, networks)
    both |= eps_runs(candidates({0.01: 10, 0.05: 90}) | {Arm("absolute", 0.0): 10}, ["synthetic"])
    assert measures.constants(both) == (0.01, 0.05)  # with the synthetic problem, and without
    key = next(key for key in store if key.arm == Arm("fedavg"))
    for seed in (0, 1, 2):
        store.pop(replace(key, seed=seed), None)
    assert measures.selected(store) is None  # a cell is missing


def test_a_target_that_is_missed_counts_with_the_budget() -> None:
    arm = Arm("relative", 0.1)
    store = eps_runs({arm: None, Arm("absolute", 10.0): 10}, ["digits"])
    cell, *_ = measures.task_cells(store, ["digits"], "smoothed")
    assert cell.rounds[arm] == EPS_TASKS["digits"].budget
    assert cell.missed[arm] == 3
    assert cell.oracle == Arm("absolute", 10.0)
    assert cell.at_edge
    zero = eps_runs({arm: 10, Arm("absolute", 0.0): 10}, ["digits"])
    assert not measures.task_cells(zero, ["digits"], "smoothed")[0].at_edge  # 0 is no edge


def test_the_decision_needs_both_criteria_on_both_tasks() -> None:
    arm = Arm("relative", 0.1)

    def decided(rounds: int, best: int, names: list[str]) -> bool | None:
        store: dict[Key, Curves] = {}
        for name in names:
            task = EPS_TASKS[name]
            eps = {Arm("absolute", e) for c in task.cells for e in task.absolute(c.local_lr)}
            store |= eps_runs({arm: rounds, **dict.fromkeys(eps, best)}, [name])
        return measures.decision(store, 0.1)

    both = ["emnist", "cifar10"]
    assert decided(10, 10, both) is True
    assert decided(16, 10, both) is False  # 1.4 times the oracle's by the smoothed crossing
    assert decided(22, 25, both) is False  # slower than FedAvg
    assert decided(10, 10, ["emnist"]) is None
    assert decided(10, 10, ["cifar10"]) is None


def test_the_decision_on_a_variant_needs_both_criteria_on_each_task() -> None:
    arm, printed, best = Arm("relative", 0.05), Arm("absolute", 1e-3), Arm("absolute", 10.0)
    tasks = list(VARIANT_TASKS)

    def decided(rounds: int, names: list[str] = tasks, **others: int) -> bool | None:
        hits = {arm: rounds, printed: others.get("printed", 15), best: others.get("best", 15)}
        return measures.variant_decision(eps_runs(hits, names))

    assert decided(15) is True
    assert decided(16) is False  # slower than the default that it would replace
    assert decided(15, printed=20, best=8) is False  # far from the oracle
    assert decided(16, printed=20) is True
    assert decided(15, tasks[:2]) is None
    whole = eps_runs({arm: 15, printed: 15, best: 15}, tasks)
    far = eps_runs({arm: 40}, ["emnist"])
    assert measures.variant_decision(whole | far) is False  # EMNIST counts by criterion 1
    near = measures.variant_verdicts(whole | eps_runs({arm: 20}, ["emnist"]))
    assert [verdict.printed is None for verdict in near.values()] == [False, False, False, True]
    assert all(verdict.holds for verdict in near.values())
    key = next(key for key in whole if key.cell.task == "mnist-200" and key.seed == 1)
    del whole[key]
    assert measures.variant_decision(whole) is None  # a seed is missing
