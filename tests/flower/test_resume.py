"""A run on Flower survives: killed at any moment, it goes on to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from safetensors.numpy import load_file

from fedexp.cli.main import main
from fedexp.flower import (
    FedAvg,
    FedExP,
    ScaffoldExP,
    central_evaluation,
    identify,
    initial_arrays,
    planned,
    planned_evaluate,
)
from fedexp.flower.layout import ndarrays
from fedexp.privacy import CentralPrivacy
from fedexp.runs import load_run
from fedexp.runs.checkpoint import Checkpoints
from fedexp.runs.files import RecordFile
from tests.flower.fake_grid import Answer, FakeGrid
from tests.flower.killing import Killed, dies_on
from tests.flower.plain_app import first_model, plain_app
from tests.helpers.problems import least_squares

ROUNDS = 4
TASK = least_squares()


def app() -> ClientApp:
    made = ClientApp()
    made.train()(planned(TASK))
    made.evaluate()(planned_evaluate(TASK))
    identify(made)
    return made


def run(folder: Path, grid: FakeGrid, **options: Any) -> Result:
    """SCAFFOLD-ExP, two of four clients a round: all the state there is."""
    strategy = ScaffoldExP(0.5, 0.5, min_available_nodes=4, checkpoint=folder, **options)
    evaluate = central_evaluation(TASK)
    return strategy.start(grid, initial_arrays(TASK), ROUNDS, evaluate_fn=evaluate)


def same_clients_elsewhere(seed: int) -> FakeGrid:
    """The federation after a restart of everything: other node ids, contexts forgotten."""
    return FakeGrid(app(), 4, seed=seed)


def plain_rows(folder: Path) -> list[dict[str, Any]]:
    rows = load_run(folder).rows
    for row in rows:
        row.pop("seconds")
        row["trained"].pop("seconds")
    return rows


def in_training(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    grid.nodes[3].fault = dies_on("train", 3)
    grid.nodes[2].fault = dies_on("train", 3)


def in_evaluation(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in grid.nodes:
        node.fault = dies_on("evaluate", 2)


def before_the_row(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: RecordFile, row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise Killed
        whole(self, row)

    whole = RecordFile.append
    monkeypatch.setattr(RecordFile, "append", append)


def within_the_row(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: RecordFile, row: dict[str, Any]) -> None:
        if row["round"] == 3:
            self._file.write(b'{"round": 3, "ser')
            raise Killed
        whole(self, row)

    whole = RecordFile.append
    monkeypatch.setattr(RecordFile, "append", append)


def before_the_checkpoint(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Checkpoints, state: Any, *rest: Any) -> None:
        if state.round == 3:
            raise Killed
        whole(self, state, *rest)

    whole = Checkpoints.write
    monkeypatch.setattr(Checkpoints, "write", write)


def within_the_checkpoint(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(self: Checkpoints, wanted: set[str]) -> None:
        if self.last is not None and self.last.round == 2:
            raise Killed
        whole(self, wanted)

    whole = Checkpoints._remove_unless
    monkeypatch.setattr(Checkpoints, "_remove_unless", remove)


def before_the_result(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def conclude(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("fedexp.runs.journal.Journal.conclude", conclude)


def in_the_first_round(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in grid.nodes:
        node.fault = dies_on("train", 1)


STAGES = [
    in_the_first_round,
    in_training,
    in_evaluation,
    before_the_row,
    within_the_row,
    before_the_checkpoint,
    within_the_checkpoint,
    before_the_result,
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_goes_on_to_the_same_numbers(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", same_clients_elsewhere(0))
    grid = same_clients_elsewhere(1)
    with monkeypatch.context() as patch:
        stage(grid, patch)
        with pytest.raises(Killed):
            run(tmp_path / "killed", grid)
    result = run(tmp_path / "killed", same_clients_elsewhere(2))
    assert plain_rows(tmp_path / "killed") == plain_rows(tmp_path / "whole")
    for name, value in ndarrays(whole.arrays).items():
        np.testing.assert_array_equal(ndarrays(result.arrays)[name], value)
    assert result.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp
    assert result.evaluate_metrics_clientapp == whole.evaluate_metrics_clientapp
    assert result.train_metrics_clientapp.keys() == whole.train_metrics_clientapp.keys()


def test_a_finished_run_returns_at_once_what_it_came_to(tmp_path: Path) -> None:
    whole = run(tmp_path / "run", same_clients_elsewhere(0))
    grid = same_clients_elsewhere(1)
    again = run(tmp_path / "run", grid)
    assert not grid.sent
    assert again.train_metrics_clientapp == whole.train_metrics_clientapp
    assert again.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp
    for name, value in ndarrays(whole.arrays).items():
        np.testing.assert_array_equal(ndarrays(again.arrays)[name], value)


def test_the_folder_is_a_run_as_any_other(tmp_path: Path) -> None:
    result = run(tmp_path / "run", same_clients_elsewhere(0))
    stored = load_run(tmp_path / "run")
    outcome = stored.outcome()
    assert outcome.status == "finished"
    assert list(outcome.curve("train_loss")) == [
        result.evaluate_metrics_serverapp[round]["train_loss"] for round in range(1, ROUNDS + 1)
    ]
    assert [row["server_lr"] for row in stored.rows] == [
        result.train_metrics_clientapp[round]["server_lr"] for round in range(1, ROUNDS + 1)
    ]
    assert stored.spec["options"]["eps"] == 1e-3
    assert "flwr" in stored.environment
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert model.keys() == ndarrays(result.arrays).keys()
    np.testing.assert_array_equal(model["params"], ndarrays(result.arrays)["params"])


def test_a_report_can_be_made_of_it(tmp_path: Path) -> None:
    run(tmp_path / "run", same_clients_elsewhere(0), name="my federation")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "my federation" in page
    assert "clients on Flower" in page


def test_the_command_line_says_who_can_go_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FedExP(checkpoint=tmp_path / "run").start(FakeGrid(plain_app()), first_model(), 1)
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "is a run on Flower; start its app again" in capsys.readouterr().err


def test_what_a_killed_round_released_is_still_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0, noise_seed=1, clients=1000)
    model = ArrayRecord({"w": Array(np.zeros(5, np.float32))})

    def reply(message: Message, answer: Answer) -> Message:
        return Message(RecordDict({"arrays": model}), reply_to=message)

    def start(folder: str, kill: bool = False) -> list[Any]:
        grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), reply))
        strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, checkpoint=tmp_path / folder)
        with monkeypatch.context() as patch:
            if kill:
                before_the_row(grid, patch)
            result = strategy.start(grid, model, ROUNDS)
        return [metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()]

    whole = start("whole")
    with pytest.raises(Killed):
        start("killed", kill=True)
    resumed = start("killed")
    assert resumed[:2] == whole[:2]
    assert resumed[2] == whole[3]  # round 3 was released twice
    assert resumed[3] > whole[3]
