"""The relative-eps study: its runner on a tiny task, and its measures on made-up curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tools.eps_study import measures, protocol, report
from tools.eps_study.__main__ import main
from tools.eps_study.curves import Curves, Key, load
from tools.eps_study.protocol import CANDIDATES, TASKS, Arm, Cell, StudyTask

from fedexp.tasks import synthetic
from fedexp.tasks.task import Task

TINY = StudyTask(
    "synthetic",
    True,
    "tests.tools.test_eps_study:tiny_synthetic",
    target=1e-2,
    budget=60,
    evaluate_every=2,
    seeds=(0,),
    grid=((0.1, 0), (0.1, 2)),
    absolute=lambda lr: (0.0, 0.1),
    metric="train_loss",
)


def tiny_synthetic(seed: int) -> Task:
    return synthetic(clients=4, rows=2, dim=20, seed=seed)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the synthetic task; store runs in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "synthetic", TINY)


def test_runs_are_stored_and_not_run_again(tiny: None, tmp_path: Path) -> None:
    command = ["--tasks", "synthetic", "--out", str(tmp_path)]
    assert main(command) == 0
    assert len(load("synthetic", tmp_path)) == 2 * (len(CANDIDATES) + 3)
    text = (tmp_path / "synthetic.csv").read_bytes()
    assert main([*command, "--seconds", "-1"]) == 0  # nothing to do
    (tmp_path / "synthetic.csv").unlink()
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--seconds", "-1", "--runs", str(tmp_path / "others")])
    assert main([*command, "--runs", str(tmp_path / "others")]) == 0
    assert (tmp_path / "synthetic.csv").read_bytes() == text  # the same bits


def test_a_run_ends_at_its_smoothed_crossing(tiny: None, tmp_path: Path) -> None:
    assert main(["--tasks", "synthetic", "--out", str(tmp_path)]) == 0
    exact = load("synthetic", tmp_path)[Key(TINY.cells[0], 0, Arm("absolute", 0.0))]
    first, smooth = exact.crossings(TINY)
    assert first is not None
    assert smooth is not None
    assert first < smooth == 2 * len(exact.values) < TINY.budget
    assert len(exact.server_lr) == len(exact.values)


def test_an_unknown_task_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tasks", "digit"]) == 1
    assert "did you mean digits" in capsys.readouterr().err


def test_every_cell_has_fedavg_and_confirmation_has_the_constant_alone() -> None:
    for task in TASKS.values():
        arms = task.arms(task.cells[0], (0.1,))
        assert arms[0] == Arm("relative", 0.1)
        assert arms[-1] == Arm("fedavg")
        assert task.budget % task.evaluate_every == 0
    lr = 10**-0.5
    assert [a.eps for a in TASKS["emnist"].arms(Cell("emnist", lr, 20), ())[:-1]] == pytest.approx(
        [0.1, 10**-0.5, 1.0, 10**0.5, 10.0]
    )


def test_arms_are_the_algorithms_that_they_name() -> None:
    server = Arm("relative", 0.05).algorithm().server
    assert (server.eps, server.eps_mode) == (0.05, "relative")  # type: ignore[attr-defined]
    assert Arm("absolute", 0.0).algorithm().server.eps_mode == "absolute"  # type: ignore[attr-defined]
    assert Arm("fedavg").algorithm().name == "fedavg"


def reaching(task: StudyTask, evaluation: int | None) -> Curves:
    """Return curves that are at the target from this evaluation on."""
    ends = task.budget // task.evaluate_every
    good = task.metric.endswith("accuracy")
    at = ends if evaluation is None else evaluation
    values = [0.0 if good else 1.0] * (at - 1) + [1.0 if good else 0.0] * (ends - at + 1)
    return Curves(tuple(values[: min(ends, at + 4)]) if evaluation else tuple(values[:-1]), (), "x")


def fabricated(hits: Mapping[Arm, int | None], names: list[str]) -> dict[Key, Curves]:
    """Return the same evaluations to target in every cell of some tasks, FedAvg's being 20."""
    store = {}
    for name in names:
        task = TASKS[name]
        constants = [arm.eps for arm in hits if arm.kind == "relative"]
        for cell in task.cells:
            for arm in task.arms(cell, constants):
                for seed in task.seeds:
                    store[Key(cell, seed, arm)] = reaching(task, hits.get(arm, 20))
    return store


def candidates(**hits: int) -> dict[Arm, int | None]:
    return {Arm("relative", c): hits.get(f"c{c:g}".replace(".", "_"), 30) for c in CANDIDATES}


def test_the_constant_with_the_least_loss_is_selected() -> None:
    hits = candidates(c0_05=12, c0_2=10) | {Arm("absolute", 0.01): 8}
    store = fabricated(hits, measures.selection_tasks())
    assert measures.selected(store) == 0.2
    cells = measures.task_cells(store, ["digits"], "first")
    assert [own.oracle for own in cells] == [Arm("absolute", 0.01)] * 6
    assert measures.to_oracle(cells, Arm("relative", 0.2)) == pytest.approx(10 / 8)
    assert measures.to_fedavg(cells, Arm("relative", 0.2)) == pytest.approx(10 / 20)
    assert "On all selection tasks (24 cells) the constant is **c = 0.2**" in report.selection(
        store
    )
    tie = fabricated(candidates(c0_05=10, c0_1=10), measures.selection_tasks())
    assert measures.selected(tie) == 0.1  # the larger
    key = next(key for key in store if key.arm == Arm("fedavg"))
    for seed in (0, 1, 2):
        store.pop(replace(key, seed=seed), None)
    assert measures.selected(store) is None  # a cell is missing


def test_the_constant_without_the_synthetic_problem_is_run_as_well() -> None:
    names = measures.selection_tasks()
    networks = [name for name in names if name != measures.INTERPOLATES]
    store = fabricated(candidates(c0_05=10, c0_01=11) | {Arm("absolute", 0.0): 10}, networks)
    store |= fabricated(candidates(c0_01=10, c0_05=90) | {Arm("absolute", 0.0): 10}, ["synthetic"])
    assert measures.constants(store) == (0.01, 0.05)
    same = fabricated(candidates(c0_05=10), names)
    assert measures.constants(same) == (0.05,)
    assert measures.constants({}) == ()
    for key in [key for key in same if key.cell.task == "synthetic" and key.seed > 0]:
        del same[key]
    assert "synthetic: not all seeds are run" in report.selection(same)


def test_a_target_that_is_missed_counts_with_the_budget() -> None:
    arm = Arm("relative", 0.1)
    store = fabricated({arm: None, Arm("absolute", 10.0): 10}, ["digits"])
    (own, *_) = measures.task_cells(store, ["digits"], "smoothed")
    assert own.rounds[arm] == TASKS["digits"].budget
    assert own.missed[arm] == 3
    assert own.oracle == Arm("absolute", 10.0)
    assert own.at_edge
    zero = fabricated({arm: 10, Arm("absolute", 0.0): 10}, ["digits"])
    assert not measures.task_cells(zero, ["digits"], "smoothed")[0].at_edge  # 0 is no edge


def test_the_decision_needs_both_criteria_on_both_tasks() -> None:
    arm = Arm("relative", 0.1)

    def decided(own: int, best: int, names: list[str]) -> bool | None:
        store: dict[Key, Curves] = {}
        for name in names:
            lr = [Arm("absolute", e) for cell in TASKS[name].cells for e in _eps(name, cell)]
            store |= fabricated({arm: own, **dict.fromkeys(lr, best)}, [name])
        return measures.decision(store, 0.1)

    both = ["emnist", "cifar10"]
    assert decided(10, 10, both) is True
    assert decided(16, 10, both) is False  # 1.4 times the oracle's by the smoothed crossing
    assert decided(22, 25, both) is False  # slower than FedAvg
    assert decided(10, 10, ["emnist"]) is None
    assert decided(10, 10, ["cifar10"]) is None


def _eps(name: str, cell: Cell) -> tuple[float, ...]:
    return protocol.TASKS[name].absolute(cell.local_lr)


def test_without_runs_every_block_has_a_text(tmp_path: Path) -> None:
    assert all(report.blocks(tmp_path).values())
    assert report.figure(tmp_path) is None


def test_a_variant_is_run_beside_its_own_base(tiny: None, tmp_path: Path) -> None:
    assert Arm("fedavg").algorithm("fedexp-m").name == "fedavgm"
    extrapolated = Arm("relative", 0.05).algorithm("scaffold-exp")
    assert extrapolated.name == "scaffold-exp"
    assert extrapolated.server.eps_mode == "relative"  # type: ignore[attr-defined]
    command = ["--tasks", "synthetic", "--out", str(tmp_path)]
    assert main([*command, "--variants", "scaffold-exp"]) == 0
    stored = load("synthetic", tmp_path, "scaffold-exp")
    assert len(stored) == 2 * 4
    assert load("synthetic", tmp_path) == {}
    assert main(command) == 0
    key = Key(TINY.cells[1], 0, Arm("absolute", 0.0))
    assert stored[key] != load("synthetic", tmp_path)[key]


def test_the_decision_on_a_variant_needs_both_criteria_on_each_task() -> None:
    arm, printed, best = Arm("relative", 0.05), Arm("absolute", 1e-3), Arm("absolute", 10.0)
    tasks = list(protocol.VARIANT_TASKS)

    def decided(own: int, names: list[str] = tasks, **others: int) -> bool | None:
        hits = {arm: own, printed: others.get("printed", 15), best: others.get("best", 15)}
        return measures.variant_decision(fabricated(hits, names))

    assert decided(15) is True
    assert decided(16) is False  # slower than the default that it would replace
    assert decided(15, printed=20, best=8) is False  # far from the oracle
    assert decided(16, printed=20) is True
    assert decided(15, tasks[:2]) is None
    whole = fabricated({arm: 15, printed: 15, best: 15}, tasks)
    far = fabricated({arm: 40}, ["emnist"])
    assert measures.variant_decision(whole | far) is False  # EMNIST counts by criterion 1
    near = measures.variant_verdicts(whole | fabricated({arm: 20}, ["emnist"]))
    assert [verdict.printed is None for verdict in near] == [False, False, False, True]
    assert all(verdict.holds for verdict in near)
    key = next(key for key in whole if key.cell.task == "mnist-200" and key.seed == 1)
    del whole[key]
    assert measures.variant_decision(whole) is None  # a seed is missing


def test_the_table_of_variants_states_what_follows() -> None:
    hits = {Arm("relative", 0.05): 15, Arm("absolute", 1e-3): 15, Arm("absolute", 10.0): 15}
    store = fabricated(hits, list(protocol.VARIANT_TASKS))
    text = report.variant_table({"scaffold-exp": store, "fedexp-m": {}})
    assert "SCAFFOLD-ExP: **c = 0.05 is the default**" in text
    assert "FedExP-M: not all runs are there" in text
    assert "| SCAFFOLD-ExP | EMNIST | not run yet |" in text
