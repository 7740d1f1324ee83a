"""The leaderboard: its protocol, its runner on a tiny task, and its page from stored curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from tools.grid import RESULTS
from tools.leaderboard import measures, protocol, report, runs
from tools.leaderboard.__main__ import main
from tools.leaderboard.measures import Cell, archived_runs, load_board
from tools.leaderboard.protocol import ENTRIES, SEEDS, SMALL, TASKS, TRIALS, BoardTask, Entry
from tools.leaderboard.runs import BoardRun, Store
from tools.results.archive import load_archive

from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError
from fedexp.experiment import simulate
from fedexp.local import LocalTraining
from fedexp.tasks import digits
from fedexp.tasks.task import Task

ROOT = Path(__file__).parents[2]
FOLDER = RESULTS / "leaderboard"
LIMIT = 400_000  # bytes of all files
TINY = BoardTask(
    "digits",
    "tiny digits",
    "tests.tools.test_leaderboard:tiny_digits",
    targets=(0.3, 0.99),
    rounds=6,
    evaluate_every=2,
    cohort=2,
    local_lr=(-1, -0.5, 0),
)
RULE = '''
from dataclasses import dataclass

import fedexp as fx
import torch


@dataclass(frozen=True)
class SignAverage(fx.ServerRule):
    """Move by the sign of the mean update."""

    lr: float = 0.01

    def step(self, params, aggregate, state):
        return params - self.lr * aggregate.mean.sign(), state, {"server_lr": torch.tensor(self.lr)}


sign = fx.Algorithm("sign", server=SignAverage())
'''


def tiny_digits(seed: int) -> Task:
    return digits(clients=5, seed=seed)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the digits task and shorten trials; store runs in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "digits", TINY)
    monkeypatch.setattr(runs, "ROUNDS", 12)


def test_every_algorithm_has_a_row_and_all_rows_have_the_same_budget() -> None:
    assert {entry.algorithm for entry in ENTRIES.values()} == set(ALGORITHMS)
    for entry in ENTRIES.values():
        assert set(entry.centres) >= set(SMALL)
        for task in SMALL:
            points = entry.points(task)
            assert len({tuple(point.items()) for point in points}) == TRIALS
            steps = {point["local.lr"] for point in points}
            ends = [protocol.power(TASKS[task].local_lr[k]) for k in (0, 2)]
            assert [min(steps), max(steps)] == ends  # the same range for all rows
            for point in points:
                options = entry.setup(LocalTraining(), task, point).options()
                assert all(options[name] == value for name, value in point.items())
    on_cifar = {name for name, entry in ENTRIES.items() if "cifar10" in entry.centres}
    core = {"fedavg", "fedexp", "fedexp-printed", "scaffold", "fedadam", "fedadagrad"}
    added = {"fedavgm", "fedexp-m", "scaffold-exp"}
    assert on_cifar == core | added
    assert {name for name, entry in ENTRIES.items() if "cifar100" in entry.centres} == core
    assert all(len(ENTRIES[name].points("cifar10")) == 1 for name in on_cifar)


def test_evaluations_divide_the_rounds() -> None:
    for task in TASKS.values():
        assert task.rounds % task.evaluate_every == 0
        assert task.targets[0] < task.targets[1]


def test_a_row_is_tuned_and_run_once_and_can_be_interrupted(tiny: None, tmp_path: Path) -> None:
    command = ["--algorithm", "fedexp", "--task", "digits", "--out"]
    assert main([*command, str(tmp_path / "a")]) == 0
    store = Store.load("digits", tmp_path / "a")
    assert len(store.trials) == TRIALS
    best = max(store.trials, key=lambda trial: trial.score)
    assert [(run.seed, run.point) for run in store.runs] == [(s, best.point) for s in SEEDS]
    run = store.runs[0]
    assert len(run.values) == 3
    assert run.seconds is None  # on a CPU
    assert run.bytes_up == run.bytes_down == 2 * 650 * 4
    assert run.worst is not None
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert sorted(files) == ["digits-tuning.csv", "digits.csv"]
    assert main([*command, str(tmp_path / "a"), "--seconds", "-1"]) == 0  # nothing to do
    with pytest.raises(SystemExit, match="0"):
        main([*command, str(tmp_path / "b"), "--seconds", "-1", "--runs", str(tmp_path / "c")])
    assert not (tmp_path / "b").exists()
    assert main([*command, str(tmp_path / "a"), "--restart"]) == 0  # the same bits
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == files


def test_runs_continue_where_they_stopped(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--algorithm", "fedavg", "--task", "digits", "--out", str(tmp_path)]
    assert main(command) == 0
    store = Store.load("digits", tmp_path)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    store.trials.pop(3)
    store.runs.pop(1)
    store.write()
    capsys.readouterr()
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["1 of 1", "1 of 1"]
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")} == whole


def test_a_score_is_the_mean_training_accuracy_of_the_last_rounds(
    tiny: None, tmp_path: Path
) -> None:
    entry = ENTRIES["scaffold"]
    assert main(["--algorithm", "scaffold", "--task", "digits", "--out", str(tmp_path)]) == 0
    point = entry.points("digits")[4]
    task = tiny_digits(0)
    setup = entry.setup(task.local, "digits", point)
    found = simulate(task, setup.algorithm, 12, 2, 0, local=setup.local, evaluate_every=1)
    accuracies = [record.train_accuracy or 0.0 for record in found]
    assert Store.load("digits", tmp_path).score("scaffold", point) == pytest.approx(
        mean(accuracies[2:]), abs=1e-5
    )


def test_an_algorithm_is_added_by_a_file_and_an_entry(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(RULE)
    entry = Entry("sign", "Sign", f"{tmp_path / 'mine.py'}:sign", "server.lr", {"digits": -2})
    monkeypatch.setitem(ENTRIES, "sign", entry)
    assert main(["--algorithm", "sign", "--out", str(tmp_path)]) == 0
    assert {run.row for run in Store.load("digits", tmp_path).runs} == {"sign"}
    made = report.blocks(tmp_path)
    assert "| Sign |" in made["board-tables"]
    assert "| Sign | `server.lr` |" in made["board-tuning"]
    assert report.figure(tmp_path) is not None


def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--algorithm", "fedxp"]) == 1
    assert "did you mean fedexp" in capsys.readouterr().err
    assert main(["--algorithm", "fedexp", "--task", "digit"]) == 1
    assert "did you mean digits" in capsys.readouterr().err
    few = replace(TASKS["emnist"], cohort=2, task="tests.tools.test_leaderboard:tiny_digits")
    monkeypatch.setitem(TASKS, "emnist", few)
    with pytest.raises(UsageError, match="294 writers, not 5; set FEDEXP_DATA"):
        ENTRIES["fedexp"].experiment("emnist", {}, 0)


def cell(*curves: list[float], row: str = "fedexp") -> Cell:
    """Return made-up runs on digits, one per curve."""
    entry = ENTRIES[row]
    point = entry.points("digits")[0]
    made = [
        BoardRun(row, seed, point, tuple(values), bytes_up=100, bytes_down=300)
        for seed, values in enumerate(curves)
    ]
    return Cell("digits", entry, tuple(made))


def test_a_target_that_a_seed_misses_has_no_mean() -> None:
    rising = [0.1] * 9 + [0.93] * 141
    late = [0.1] * 19 + [0.95] * 131
    found = cell(rising, late)
    assert found.crossings(0, "first") == [10, 20]
    assert found.crossings(0) == [14, 24]  # the mean of five evaluations
    assert (found.rounds(0), found.rounds(1)) == (19, None)
    assert found.final == pytest.approx(0.94)
    assert found.spread == pytest.approx(stdev([0.93, 0.95]))
    assert found.bytes_to_target == 19 * 400
    assert found.edges() == {"local.lr"}
    diverged = cell(rising, late[:100])
    assert diverged.final is None
    assert diverged.rounds(0) == 19
    text = report.tables({("digits", "fedexp"): found})
    assert "| FedExP, recommended | 19 (15) | 1 of 2 (1 of 2) | 94.00 ± 1.41 % |" in text
    assert "| FedAvg |  |  |" in text  # not run
    assert "1 of 2 diverged" in report.tables({("digits", "fedexp"): diverged})


def test_measures_and_tasks_without_values_are_left_out() -> None:
    board = {("digits", "fedexp"): cell([0.95] * 150)}
    text = report.tables(board)
    assert "| final | sent up | sent down | sent to 92\u00a0% | seeds |" in text
    assert "EMNIST" not in text.partition("No runs yet: ")[0]
    rest = "No runs yet: EMNIST, 294 writers, Shakespeare (LSTM), CIFAR-10, CIFAR-100."
    assert text.endswith(rest)
    assert report.summary(board).endswith(rest)
    assert report.summary(board).startswith("| algorithm | digits (MLP): 94\u00a0% |\n")


def test_rows_are_sorted_by_rounds_to_the_upper_target() -> None:
    fast, slow = [0.95] * 150, [0.1] * 50 + [0.95] * 100
    board = {
        ("digits", "fedavg"): cell(slow, row="fedavg"),
        ("digits", "fedadam"): cell([0.5] * 150, row="fedadam"),
        ("digits", "scaffold"): cell(fast, row="scaffold"),
    }
    lines = report.tables(board).splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert names[2:5] == ["SCAFFOLD", "FedAvg", "FedAdam"]


def test_archived_runs_count_where_all_settings_agree() -> None:
    archive = load_archive(ROOT / "results").runs
    found = archived_runs(archive, ENTRIES["fedexp-printed"], "cifar10")
    assert {run.seed for run in found} >= {0, 1}
    assert len(found) == len({run.seed for run in found})
    assert all(len(run.values) == 100 for run in found)
    other = replace(ENTRIES["fedexp-printed"], fixed={"server.factor": 1.5})
    assert not archived_runs(archive, other, "cifar10")
    assert not archived_runs(archive, ENTRIES["fedavg"], "emnist")  # tuned here


@pytest.mark.parametrize("task", ["cifar10", "cifar100"])
def test_no_cell_is_empty_where_the_archive_has_a_run_of_the_paper(task: str) -> None:
    archive = load_archive(ROOT / "results").runs
    specs = [run.spec for run in archive if run.spec["task"] == task and not run.spec["set"]]
    ran = {spec["algorithm"] for spec in specs if spec["mode"] == "paper"}
    assert {"fedavg", "fedexp", "scaffold", "fedadagrad"} <= ran
    shown = {
        cell.entry.algorithm for (of, _), cell in load_board(FOLDER, archive).items() if of == task
    }
    assert shown == ran


def test_the_stored_runs_are_those_of_the_protocol() -> None:
    for name, task in TASKS.items():
        store = Store.load(name, FOLDER)
        for trial in store.trials:
            assert trial.point in ENTRIES[trial.row].points(name)
        keys = [(run.row, run.seed) for run in store.runs]
        assert len(keys) == len(set(keys))
        for run in store.runs:
            assert run.seed in SEEDS
            assert run.point == store.best(ENTRIES[run.row])
            assert len(run.values) <= task.rounds // task.evaluate_every
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT


def test_the_page_agrees_with_the_stored_curves() -> None:
    """Recompute every row of the digits table from the CSV files, without `measures`."""
    page = (ROOT / "docs" / "leaderboard.md").read_text()
    section = page.partition("### digits (MLP)")[2].partition("###")[0]
    lines = {line.split("|")[1].strip(): line for line in section.splitlines()[4:] if line}
    stored = Store.load("digits", FOLDER).runs
    assert stored
    for entry in ENTRIES.values():
        curves = [run.values for run in stored if run.row == entry.name]
        for at, target in enumerate(TASKS["digits"].targets):
            first = [next((k + 1 for k, v in enumerate(c) if v >= target), None) for c in curves]
            smooth = [
                next((k for k in range(5, len(c) + 1) if mean(c[k - 5 : k]) >= target), None)
                for c in curves
            ]
            reached = [[n for n in each if n is not None] for each in (smooth, first)]
            if all(len(each) == len(curves) for each in reached):
                expected = f"{mean(reached[0]):.0f} ({mean(reached[1]):.0f})"
            else:
                expected = " ".join(
                    text.format(f"{len(each)} of {len(curves)}")
                    for text, each in zip(("{}", "({})"), reached, strict=True)
                )
            assert lines[entry.title].split("|")[2 + at].strip() == expected
        if all(len(curve) == TASKS["digits"].rounds for curve in curves):
            final = 100 * mean(mean(curve[-5:]) for curve in curves)
            assert lines[entry.title].split("|")[4].strip().startswith(f"{final:.2f} ±")


def test_without_runs_every_block_has_a_text(tmp_path: Path) -> None:
    assert all(report.blocks(tmp_path).values())
    assert report.figure(tmp_path) is None
    assert load_board(tmp_path) == {}
    assert measures.archived_runs([], ENTRIES["fedavg"], "cifar10") == []
