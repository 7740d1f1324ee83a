"""Runs of the leaderboard and of the eps study: executed once, and stored as lines of CSV files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from tools import grid
from tools.eps_study import curves
from tools.eps_study import protocol as eps_protocol
from tools.eps_study.__main__ import main as eps_main
from tools.eps_study.curves import Curves, Key
from tools.eps_study.protocol import Arm, Cell, StudyTask
from tools.leaderboard import report as board_report
from tools.leaderboard import runs as board_runs
from tools.leaderboard.__main__ import main as board_main
from tools.leaderboard.measures import load_board
from tools.leaderboard.protocol import ENTRIES, SEEDS, TASKS, TRIALS, BoardTask
from tools.leaderboard.runs import BoardRun, Store, Trial

from fedexp.errors import UsageError
from fedexp.experiment import simulate
from fedexp.runs import Outcome
from fedexp.tasks import digits, synthetic
from fedexp.tasks.task import Task

RESULTS = Path(__file__).parents[2] / "results"
BOARD_ROUNDS, TRIAL_ROUNDS = 6, 12


def tiny_digits(seed: int) -> Task:
    return digits(clients=5, seed=seed)


def tiny_synthetic(seed: int) -> Task:
    return synthetic(clients=4, rows=2, dim=20, seed=seed)


TINY_BOARD = BoardTask(
    "digits",
    "tiny digits",
    f"{__name__}:tiny_digits",
    targets=(0.3, 0.99),
    rounds=BOARD_ROUNDS,
    evaluate_every=2,
    cohort=2,
    local_lr=(-1, -0.5, 0),
)
TINY_STUDY = StudyTask(
    "synthetic",
    True,
    f"{__name__}:tiny_synthetic",
    target=1e-2,
    budget=60,
    evaluate_every=2,
    seeds=(0,),
    grid=((0.1, 0), (0.1, 2)),
    absolute=lambda lr: (0.0, 0.1),
    metric="train_loss",
)
Command = Callable[..., str]


def contents(folder: Path, pattern: str = "*") -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob(pattern)}


@pytest.fixture
def board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Execute a row of a tiny leaderboard, and return what is printed."""
    monkeypatch.setitem(TASKS, "digits", TINY_BOARD)
    monkeypatch.setattr(board_runs, "ROUNDS", TRIAL_ROUNDS)
    always = ["--task", "digits", "--out", f"{tmp_path / 'out'}"]

    def command(row: str, *options: str, runs: str = "runs") -> str:
        where = ["--runs", f"{tmp_path / runs}"]
        assert board_main(["--algorithm", row, *always, *where, *options]) == 0
        return capsys.readouterr().out

    return command


@pytest.fixture
def study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Execute a tiny task of the eps study, and return what is printed."""
    monkeypatch.setitem(eps_protocol.TASKS, "synthetic", TINY_STUDY)
    always = ["--tasks", "synthetic", "--out", f"{tmp_path / 'out'}"]

    def command(variants: str, *options: str, runs: str = "runs") -> str:
        where = ["--runs", f"{tmp_path / runs}"]
        assert eps_main([*always, "--variants", variants, *where, *options]) == 0
        return capsys.readouterr().out

    return command


# The leaderboard ----------------------------------------------------------------------------------


def test_lines_of_the_leaderboard_are_what_simulate_trains(board: Command, tmp_path: Path) -> None:
    """Scores are means over the last ten rounds; the point with the best one is judged."""
    board("scaffold")
    entry, store = ENTRIES["scaffold"], Store.load("digits", tmp_path / "out")
    assert [trial.point for trial in store.trials] == entry.points("digits")
    middle = entry.points("digits")[4]
    best = max(store.trials, key=lambda trial: trial.score).point
    assert best != middle
    assert [(run.seed, run.point) for run in store.runs] == [(seed, best) for seed in SEEDS]

    def trained(point: dict[str, float], seed: int, rounds: int) -> list[Any]:
        task = tiny_digits(seed)
        setup = entry.setup(task.local, "digits", point)
        arguments = (task, setup.algorithm, rounds, TINY_BOARD.cohort, seed)
        settings: dict[str, Any] = {"evaluate_every": 1, "by_client": True}
        return list(simulate(*arguments, local=setup.local, **settings))

    accuracies = [record.train_accuracy for record in trained(middle, 0, TRIAL_ROUNDS)]
    assert store.trials[4].score == pytest.approx(mean(accuracies[2:]), abs=1e-5)
    for run in store.runs:
        records = trained(best, run.seed, BOARD_ROUNDS)
        assert run.values == tuple(round(record.test_accuracy, 4) for record in records[1::2])
        decile = records[-1].to_json()["train_accuracy_worst_decile"]
        assert run.worst == pytest.approx(decile, abs=1e-4)
        assert (run.bytes_up, run.bytes_down) == (2 * 2 * 650 * 4, 2 * 2 * 650 * 4)
        assert run.machine.startswith("CPU, torch ")
        assert run.seconds is None


def test_a_row_of_the_leaderboard_is_run_once(
    board: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert len(board("fedexp").splitlines()) == TRIALS + len(SEEDS)
    files = contents(out)
    assert sorted(path.name for path in files) == ["digits-tuning.csv", "digits.csv"]
    assert board("fedexp", runs="none") == ""
    assert not (tmp_path / "none").exists()
    for name, line in (("digits-tuning.csv", 4), ("digits.csv", 2)):
        lines = (out / name).read_text().splitlines(keepends=True)
        (out / name).write_text("".join([*lines[:line], *lines[line + 1 :]]))
    assert len(board("fedexp,fedexp", runs="again").splitlines()) == 2
    assert len(list((tmp_path / "again").glob("*/result.json"))) == 2
    assert contents(out) == files
    assert "| FedExP, recommended |" in board_report.tables(load_board(out))
    store = Store.load("digits", out)
    worst = min(store.trials, key=lambda trial: trial.score)
    store.trials.append(worst._replace(score=1.0))
    store.trials.remove(worst)
    store.write()
    assert len(board("fedexp").splitlines()) == len(SEEDS)  # another point is the best one now
    judged = Store.load("digits", out).runs
    assert [(run.seed, run.point) for run in judged] == [(seed, worst.point) for seed in SEEDS]
    assert board_main(["--algorithm", "fedxp"]) == 1
    assert "did you mean fedexp" in capsys.readouterr().err


def test_restart_discards_the_row_alone(
    board: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart that is stopped leaves the files as they are."""
    board("fedavg,fedexp")
    files, results = contents(tmp_path / "out"), contents(tmp_path / "runs", "*/result.json")
    for path, text in files.items():
        path.write_bytes(text.replace(b"CPU", b"old"))
    with pytest.raises(SystemExit):
        board("fedexp", "--restart", "--seconds", "-1")
    assert capsys.readouterr().out == "stopped; the same command starts over\n"
    assert all(path.read_bytes() == text.replace(b"CPU", b"old") for path, text in files.items())
    board("fedexp", "--restart")
    for path, text in files.items():
        fedavg, comma, fedexp = text.partition(b"\nfedexp,")
        assert path.read_bytes() == fedavg.replace(b"CPU", b"old") + comma + fedexp
    again = contents(tmp_path / "runs", "*/result.json")
    assert sum(again[path] != text for path, text in results.items()) == TRIALS + len(SEEDS)


def test_a_deadline_stops_after_a_round_and_nothing_is_run_twice(
    board: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A clock that shows the number of rounds: 30 rounds are two trials and a half."""
    with monkeypatch.context() as patched:
        clock = count()
        patched.setattr(grid, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with pytest.raises(SystemExit) as stopped:
            board("fedexp", "--seconds", "30")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["stopped; the same command continues"]
    assert not (tmp_path / "out").exists()
    finished = contents(tmp_path / "runs", "*/result.json")
    assert len(finished) == 2
    board("fedexp")
    after = contents(tmp_path / "runs", "*/result.json")
    assert len(after) == TRIALS + len(SEEDS)
    assert {path: after[path] for path in finished} == finished  # with their seconds
    files = contents(tmp_path / "out")
    for path in files:
        path.unlink()
    board("fedexp", runs="at-once")
    assert contents(tmp_path / "out") == files


def test_a_point_is_run_with_all_options_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a task with another number of clients, which other data would have, it is not."""
    monkeypatch.setitem(TASKS, "digits", TINY_BOARD)
    entry = replace(ENTRIES["fedprox-exp"], fixed={"local.optimizer": "adam"})
    assert entry.by_task["digits"] == {"client.mu": 0.01}
    point = {"local.lr": 0.25, "server.eps": 0.125}
    settings: dict[str, Any] = {"rounds": 6, "evaluate_every": 2}
    spec = entry.experiment("digits", point, 2, **settings).spec
    assert (spec["seed"], spec["rounds"], spec["cohort"]) == (2, 6, 2)
    options = {**point, "local.optimizer": "adam", "client.mu": 0.01}
    assert {name: spec["options"][name] for name in options} == options
    monkeypatch.setitem(TASKS, "digits", replace(TINY_BOARD, clients=294))
    with pytest.raises(UsageError, match="the leaderboard has tiny digits, not 5; set FEDEXP_DATA"):
        entry.experiment("digits", point, 2, **settings)


# Outcomes as lines --------------------------------------------------------------------------------


def ended(
    folder: Path, rows: Sequence[dict[str, Any]], diverged_at: int | None = None, **spec: Any
) -> Outcome:
    """Return the outcome of a run on a GPU with these rows."""
    (folder / "environment.json").write_text('{"device": "NVIDIA T", "torch": "2.9.1+cu128"}')
    spec = {"device": "cuda:1", "precision": "bf16", **spec}
    return Outcome(spec, list(rows), 12.345, diverged_at, folder=folder)


def board_row(number: int, accuracy: float | None, score: float | None = None) -> dict[str, Any]:
    sent = {"bytes_up": 100, "bytes_down": 300}
    worst = {"train_accuracy_worst_decile": 0.1, "test_accuracy_worst_decile": 0.23456}
    accuracies = {"test_accuracy": accuracy, "train_accuracy": score}
    return {"round": number, **accuracies, **sent, **worst}


@pytest.mark.parametrize("diverged_at", [None, 5])
def test_a_judged_run_is_a_line_and_back(tmp_path: Path, diverged_at: int | None) -> None:
    accuracies = [None, 0.123456, None, 0.5, None, 0.75][: diverged_at and diverged_at - 1]
    rows = [board_row(k, value) for k, value in enumerate(accuracies, 1)]
    point = {"local.lr": 0.316228, "server.eps": 1e-3}
    run = BoardRun.of("fedexp-printed", 2, point, "test", ended(tmp_path, rows, diverged_at))
    whole = diverged_at is None
    assert run.values == ((0.1235, 0.5, 0.75) if whole else (0.1235, 0.5))
    assert (run.worst, run.seconds) == ((0.2346, 12.3) if whole else (None, None))
    assert (run.bytes_up, run.bytes_down) == (100, 300)
    assert run.machine == "NVIDIA T, bf16, torch 2.9.1"
    nothing = BoardRun.of("fedexp", 0, {"local.lr": 1.0}, "test", ended(tmp_path, [], 1))
    assert nothing == BoardRun("fedexp", 0, {"local.lr": 1.0}, (), machine=run.machine)
    Store("digits", tmp_path, [], [nothing, run]).write()
    assert Store.load("digits", tmp_path).runs == [nothing, run]


def test_a_trial_is_a_line_and_back(tmp_path: Path) -> None:
    early = [board_row(k, None, 1.0 if k % 10 == 0 else None) for k in range(1, 41)]
    rows = early + [board_row(k, None, 0.6 + k / 1000) for k in range(41, 51)]
    points = [{"local.lr": 0.1, "server.lr": lr} for lr in (0.1, 1.0)]
    good = Trial.of("fedadam", points[0], ended(tmp_path, rows))
    assert good.score == pytest.approx(0.6455)
    bad = Trial.of("fedadam", points[1], ended(tmp_path, rows[:-1], 50))
    assert bad == Trial("fedadam", points[1], 0.0, "NVIDIA T, bf16, torch 2.9.1")
    Store("digits", tmp_path, [bad, good], []).write()
    assert Store.load("digits", tmp_path).trials == [good, bad]


def test_the_best_point_has_the_highest_score_and_of_equal_ones_is_the_first() -> None:
    entry = ENTRIES["fedadam"]
    points = entry.points("digits")
    scores = [0.1, 0.2, 0.7, 0.3, 0.7, 0.0, 0.6, 0.5, 0.4]
    trials = [Trial("fedadam", p, score, "") for p, score in zip(points, scores, strict=True)]
    other = [Trial("fedavg", points[0], 0.9, "")]
    other += [Trial("fedadam", {**points[0], "local.lr": 7.0}, 0.9, "")]  # of no point of the grid
    runs = [
        BoardRun("fedadam", seed, points[k], ()) for k, seed in ((2, 1), (4, 0), (2, 0), (2, 2))
    ]
    store = Store("digits", Path(), [*reversed(trials), *other], runs)
    assert store.best(entry) == points[2]
    assert [(run.seed, run.point) for run in store.judged(entry)] == [(s, points[2]) for s in SEEDS]
    store.trials.remove(trials[5])
    assert store.best(entry) is None  # a trial is missing, though not the best
    assert Store("cifar10", Path(), [], []).best(entry) == entry.points("cifar10")[0]


def test_a_curve_ends_at_its_smoothed_crossing_or_where_the_run_does(tmp_path: Path) -> None:
    """Both crossings are those of the four digits that are stored: here the third and eighth."""
    accuracy = replace(TINY_STUDY, target=0.5, metric="test_accuracy")
    values = [0.1, 0.2, 0.49996, 0.5, 0.4, 0.5, 0.59006, 0.7, 0.8, 0.9]

    def stored(number: int, diverged_at: int | None = None) -> Curves:
        rows = [{"round": 1, "test_accuracy": None, "server_lr": 1.0}] * (2 * number)
        for k, value in enumerate(values[:number]):
            rows[2 * k + 1] = {"test_accuracy": value, "server_lr": 1.23456 + k}
        return Curves.of(accuracy, ended(tmp_path, rows, diverged_at))

    whole = stored(10)
    assert whole.values == (0.1, 0.2, 0.5, 0.5, 0.4, 0.5, 0.5901, 0.7)
    assert whole.server_lr == (1.23, 2.23, 3.23, 4.23, 5.23, 6.23, 7.23, 8.23)
    assert whole.machine == "NVIDIA T, bf16, torch 2.9.1"
    assert whole.crossings(accuracy) == (6, 16)
    assert stored(7, 15).crossings(accuracy) == (6, None)
    assert len(stored(7, 15).values) == 7
    assert stored(9, 19) == whole  # diverged later


# The study of relative eps ------------------------------------------------------------------------


def test_lines_of_the_eps_study_are_what_simulate_trains(study: Command, tmp_path: Path) -> None:
    study("fedprox-exp")
    store = curves.load("synthetic", tmp_path / "out", "fedprox-exp")
    assert len(store) == 2 * 4
    reached = 0
    for key, stored in store.items():
        task = tiny_synthetic(0)
        local, cohort = replace(task.local, lr=0.1), key.cell.cohort or "all"
        algorithm = key.arm.algorithm("fedprox-exp")
        settings: dict[str, Any] = {"local": local, "evaluate_every": 1}
        records = list(simulate(task, algorithm, 60, cohort, 0, **settings))[1::2]
        losses = [float(f"{record.train_loss:.4g}") for record in records]
        smooth = next((k for k in range(5, 31) if mean(losses[k - 5 : k]) <= 1e-2), None)
        reached += smooth is not None
        assert stored.values == tuple(losses[:smooth])
        assert stored.server_lr == tuple(float(f"{r.server_lr:.3g}") for r in records[:smooth])
        first = next((2 * k for k, loss in enumerate(losses, 1) if loss <= 1e-2), None)
        assert stored.crossings(TINY_STUDY) == (first, smooth and 2 * smooth)
    assert reached > 0


def test_the_eps_study_is_run_once(
    study: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, number = tmp_path / "out", 2 * (6 + 2 + 1)  # cells; candidates, absolute eps, FedAvg
    with pytest.raises(SystemExit) as stopped:
        study("fedexp", "--seconds", "-1")
    assert stopped.value.code == 0
    assert capsys.readouterr().out == "stopped; the same command continues\n"
    assert not out.exists()
    assert len(study("fedexp,scaffold-exp").splitlines()) == number + 2 * 4
    files = contents(out)
    assert {path.name for path in files} == {"synthetic.csv", "scaffold-exp-synthetic.csv"}
    assert len(set(files.values())) == 2
    assert study("fedexp,scaffold-exp", runs="none") == ""
    path = out / "synthetic.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:7], *lines[8:]]))
    assert len(study("fedexp", runs="again").splitlines()) == 1
    assert contents(out) == files
    assert eps_main(["--tasks", "digit"]) == 1
    assert "did you mean digits" in capsys.readouterr().err


def test_a_key_is_run_with_its_cell_and_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(eps_protocol.TASKS, "synthetic", TINY_STUDY)
    args = SimpleNamespace(device=None, precision=None)
    keys = {
        Key(Cell("synthetic", 0.1, 0), 0, Arm("relative", 0.05)): (None, "relative", 0.05),
        Key(Cell("synthetic", 0.25, 3), 7, Arm("absolute", 0.01)): (3, "absolute", 0.01),
    }
    for key, (cohort, mode, eps) in keys.items():
        spec = key.experiment("fedexp", args).spec  # type: ignore[arg-type]
        options = spec["options"]
        assert (spec["seed"], spec["rounds"], spec["evaluate_every"]) == (key.seed, 60, 2)
        assert (spec.get("cohort"), options["local.lr"]) == (cohort, key.cell.local_lr)
        assert (options["server.eps_mode"], options["server.eps"]) == (mode, eps)


# The archived files -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["digits", "emnist", "shakespeare"])
def test_archived_files_of_the_leaderboard_are_written_as_they_were(
    task: str, tmp_path: Path
) -> None:
    store = Store.load(task, RESULTS / "leaderboard")
    assert store.trials
    replace(store, folder=tmp_path).write()
    archived = contents(RESULTS / "leaderboard", f"{task}*.csv")
    assert {path.name: text for path, text in contents(tmp_path).items()} == {
        path.name: text for path, text in archived.items()
    }


STORED = [
    (name, variant)
    for name, variant in product(eps_protocol.TASKS, eps_protocol.VARIANTS)
    if curves.load(name, RESULTS / "eps-study", variant)
]


@pytest.mark.parametrize(("name", "variant"), STORED)
def test_archived_files_of_the_eps_study_are_written_as_they_were(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stored runs are of the protocol, and none has evaluations after its smoothed crossing."""
    task, folder = eps_protocol.TASKS[name], RESULTS / "eps-study"
    for key, stored in curves.load(name, folder, variant).items():
        arms = task.arms(key.cell, (*eps_protocol.CANDIDATES, eps_protocol.VARIANT_CONSTANT))
        assert (key.cell in task.cells, key.seed in task.seeds, key.arm in arms) == (True,) * 3
        assert len(stored.values) == len(stored.server_lr) <= task.budget // task.evaluate_every
        smooth = stored.crossings(task)[1]
        assert smooth in (None, len(stored.values) * task.evaluate_every)
    file = f"{name}.csv" if variant == "fedexp" else f"{variant}-{name}.csv"
    before = (folder / file).read_bytes()
    (tmp_path / file).write_bytes(before)
    monkeypatch.setitem(eps_protocol.TASKS, name, replace(task, seeds=()))  # nothing to run
    args = SimpleNamespace(out=tmp_path, runs=tmp_path, jobs=1, began=0.0, seconds=0.0)
    curves.complete(name, (), variant, args)  # type: ignore[arg-type]
    assert contents(tmp_path) == {tmp_path / file: before}


def test_every_archived_file_of_the_eps_study_is_read() -> None:
    files = list((RESULTS / "eps-study").glob("*.csv"))
    assert len(files) == len(STORED) > 10
