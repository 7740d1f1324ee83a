"""Runs in folders: resumed to the same numbers whenever killed; other runs are refused."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import load_file

import fedexp as fx
from fedexp.cli.main import main
from fedexp.errors import DivergedError, UsageError
from fedexp.flower import (
    FedAvg,
    FedExP,
    RuleStrategy,
    ScaffoldExP,
    central_evaluation,
    initial_arrays,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.server import NoRepliesError
from fedexp.flower.simulated_client import from_arrays
from fedexp.privacy import CentralPrivacy
from fedexp.runs import load_run
from fedexp.runs.checkpoint import NEWEST, Checkpoint, Checkpoints
from fedexp.runs.folder import RunWarning
from fedexp.runs.records import RECORDS, RecordFile
from fedexp.storage import write_json
from tests.flower.helpers.fake_grid import (
    Answer,
    FakeGrid,
    Killed,
    dies_on,
    healthy,
    only,
    raises,
    replies,
    with_array,
)
from tests.flower.helpers.plain_app import DIM, first_model, plain_app
from tests.flower.helpers.user_app import (
    control,
    simulated_app,
    uniform_strategy,
)
from tests.helpers.problems import least_squares

ROUNDS = 4
TASK = least_squares()
SMALL = least_squares(clients=4, dim=8)
CLOSE = 1e-10
BAD = 1  # the position of the node that misbehaves
HUGE = replies(with_array("w", np.full(DIM, 1e12, np.float32)))


def run(folder: Path, grid: FakeGrid, **options: Any) -> Result:
    """SCAFFOLD-ExP, two of four clients per round: all the state there is."""
    strategy = ScaffoldExP(0.5, 0.5, min_available_nodes=4, checkpoint=folder, **options)
    evaluate = central_evaluation(TASK)
    return strategy.start(grid, initial_arrays(TASK), ROUNDS, evaluate_fn=evaluate)


def restarted_grid(seed: int) -> FakeGrid:
    """The federation after a restart of everything: other node ids, new contexts."""
    return FakeGrid(simulated_app(TASK), 4, seed=seed)


def plain_rows(folder: Path) -> list[dict[str, Any]]:
    rows = load_run(folder).rows
    for row in rows:
        row.pop("seconds")
        row["trained"].pop("seconds")
        row["largest_share"].pop(1)  # ids of nodes are new in every federation
    return rows


def in_training(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    grid.nodes[3].fault = dies_on("train", 3)
    grid.nodes[2].fault = dies_on("train", 3)


def in_evaluation(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for node in grid.nodes:
        node.fault = dies_on("evaluate", 2)


def before_the_row(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def append(self: RecordFile, row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise Killed
        original(self, row)

    original = RecordFile.append
    monkeypatch.setattr(RecordFile, "append", append)


def within_the_row(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def append(self: RecordFile, row: dict[str, Any]) -> None:
        if row["round"] == 3:
            with (folder / RECORDS).open("ab") as file:
                file.write(b'{"round": 3, "ser')
            raise Killed
        original(self, row)

    original = RecordFile.append
    monkeypatch.setattr(RecordFile, "append", append)


def before_the_checkpoint(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def write(self: Checkpoints, state: Any, *rest: Any) -> None:
        if state.round == 3:
            raise Killed
        original(self, state, *rest)

    original = Checkpoints.write
    monkeypatch.setattr(Checkpoints, "write", write)


def within_the_checkpoint(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """After the file of the newest checkpoint, before what it no longer needs is removed."""

    def write(path: Path, value: Any, **options: Any) -> None:
        original(path, value, **options)
        if path.name == NEWEST and value["round"] == 3:
            raise Killed

    original = write_json
    monkeypatch.setattr("fedexp.runs.checkpoint.write_json", write)


def before_the_result(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def conclude(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("fedexp.runs.journal.Journal.conclude", conclude)


def in_the_first_round(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
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
def test_a_killed_run_resumes_to_the_same_numbers(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", restarted_grid(0))
    grid = restarted_grid(1)
    with monkeypatch.context() as patch:
        stage(grid, patch, tmp_path / "killed")
        with pytest.raises(Killed):
            run(tmp_path / "killed", grid)
    result = run(tmp_path / "killed", restarted_grid(2))
    assert plain_rows(tmp_path / "killed") == plain_rows(tmp_path / "whole")
    for name, value in ndarrays(whole.arrays).items():
        np.testing.assert_array_equal(ndarrays(result.arrays)[name], value)
    assert result.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp
    assert result.evaluate_metrics_clientapp == whole.evaluate_metrics_clientapp
    assert result.train_metrics_clientapp.keys() == whole.train_metrics_clientapp.keys()


def test_a_finished_run_returns_its_stored_result(tmp_path: Path) -> None:
    whole = run(tmp_path / "run", restarted_grid(0))
    grid = restarted_grid(1)
    again = run(tmp_path / "run", grid)
    assert not grid.sent
    assert again.train_metrics_clientapp == whole.train_metrics_clientapp
    assert again.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp
    for name, value in ndarrays(whole.arrays).items():
        np.testing.assert_array_equal(ndarrays(again.arrays)[name], value)


def test_the_folder_is_a_run_as_any_other(tmp_path: Path) -> None:
    result = run(tmp_path / "run", restarted_grid(0))
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
    run(tmp_path / "run", restarted_grid(0), name="my federation")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "my federation" in page
    assert "clients on Flower" in page


def test_the_command_line_names_the_app_that_can_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FedExP(checkpoint=tmp_path / "run").start(FakeGrid(plain_app()), first_model(), 1)
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "is a run on Flower; start its app again" in capsys.readouterr().err


def test_what_a_killed_round_released_is_still_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0, clients=1000)
    model = ArrayRecord({"w": Array(np.zeros(5, np.float32))})

    def reply(message: Message, answer: Answer) -> Message:
        return Message(RecordDict({"arrays": model}), reply_to=message)

    def start(folder: str, kill: bool = False) -> list[Any]:
        grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), reply))
        strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, checkpoint=tmp_path / folder)
        with monkeypatch.context() as patch:
            if kill:
                before_the_row(grid, patch, tmp_path / folder)
            result = strategy.start(grid, model, ROUNDS)
        return [metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()]

    whole = start("whole")
    with pytest.raises(Killed):
        start("killed", kill=True)
    resumed = start("killed")
    assert resumed[:2] == whole[:2]
    assert resumed[2] == whole[3]  # round 3 was released twice
    assert resumed[3] > whole[3]


class ServerDiesError(Exception):
    """The SuperLink was killed."""


def test_scaffold_resumes_after_server_and_nodes_died(tmp_path: Path) -> None:
    def dies(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if round == 3:
            raise ServerDiesError
        return None

    folder, arrays = tmp_path / "run", initial_arrays(SMALL)
    options: dict[str, Any] = {"fraction_train": 0.5, "checkpoint": folder}
    before, after = (
        uniform_strategy(fx.scaffold_exp(), **options),
        uniform_strategy(fx.scaffold_exp(), **options),
    )
    with pytest.raises(ServerDiesError):
        before.start(FakeGrid(simulated_app(SMALL), 4), arrays, num_rounds=6, evaluate_fn=dies)
    result = after.start(FakeGrid(simulated_app(SMALL), 4, seed=9), arrays, num_rounds=6)
    *_, last = fx.simulate(SMALL, fx.scaffold_exp(), rounds=6, cohort=2, engine="loop")
    assert result.arrays is not None
    params, _ = from_arrays(SMALL, result.arrays)
    torch.testing.assert_close(params, last.state.output()[0], rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(
        control(after), last.state.broadcast["control"], rtol=CLOSE, atol=CLOSE
    )


@pytest.mark.parametrize(
    ("strategy", "arrays", "pattern"),
    [
        (lambda f: FedExP(checkpoint=f, eps=1.0), None, r"options\.eps is 0\.05, here it is"),
        (lambda f: FedExP(checkpoint=f, seed=1), None, "there seed is 0, here it is 1"),
        (lambda f: FedAvg(checkpoint=f), None, "there algorithm is fedexp, here it is fedavg"),
        (lambda f: FedExP(checkpoint=f), {"w": np.zeros(2, np.float32)}, "there model is 3 arr"),
        (lambda f: FedExP(checkpoint=f, weighting="uniform"), None, "weighting"),
        (lambda f: FedExP(checkpoint=f, max_norm=9.0, seed=1), None, "there seed is 0"),
    ],
)
def test_the_folder_of_another_run_is_refused_with_the_remedy(
    strategy: Any, arrays: Any, pattern: str, tmp_path: Path
) -> None:
    FedExP(checkpoint=tmp_path / "run").start(FakeGrid(plain_app()), first_model(), 2)
    before = contents(tmp_path / "run")
    model = first_model() if arrays is None else record_of(arrays)
    with pytest.raises(UsageError, match=pattern) as raised:
        strategy(tmp_path / "run").start(FakeGrid(plain_app()), model, 2)
    assert "choose another folder" in str(raised.value)
    assert contents(tmp_path / "run") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def record_of(named: dict[str, Any]) -> Any:
    return ArrayRecord({name: Array(value) for name, value in named.items()})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no run"):
        FedExP(checkpoint=tmp_path).start(FakeGrid(plain_app()), first_model(), 2)


class Decaying(FedExP):
    """A rate that changes round by round in the config itself, as Flower's guides show it."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = float(config["lr"]) * 0.5  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)


def test_a_config_that_changes_resumes_as_it_was(tmp_path: Path) -> None:
    given = ConfigRecord({"lr": 1.0, "name": "mine"})
    sent_rates: dict[int, Any] = {}

    def tap(message: Message) -> None:
        config: Any = message.content.config_records.get("config", {})
        sent_rates[config.get("server-round", 0)] = config.get("lr")

    for last in (2, 3, None):
        grid = FakeGrid(plain_app())
        for node in grid.nodes:
            node.fault = dies_on("train", last) if last else healthy
        grid.taps.append(tap)
        strategy = Decaying(fraction_evaluate=0.0, checkpoint=tmp_path / "run")
        with pytest.raises(Killed) if last else nullcontext():
            strategy.start(grid, first_model(), ROUNDS, train_config=given)
    assert [sent_rates[round] for round in range(1, ROUNDS + 1)] == [0.5, 0.25, 0.125, 0.0625]
    assert dict(given) == {"lr": 1.0, "name": "mine"}  # the caller's own is unchanged


@dataclass(frozen=True)
class Nested(fx.Average):
    """A rule of one's own, with options that a file has no words for."""

    inner: fx.Average | None = None
    bounds: tuple[float, ...] = (0.0, float("inf"))


def test_rules_with_any_options_can_be_stored_and_resumed(tmp_path: Path) -> None:
    def start(inner: fx.Average) -> Result:
        algorithm = fx.Algorithm("mine", server=Nested(inner=inner))
        strategy = RuleStrategy(algorithm=algorithm, checkpoint=tmp_path / "run")
        return strategy.start(FakeGrid(plain_app()), first_model(), 1)

    assert start(fx.Average(0.5)).train_metrics_clientapp
    assert start(fx.Average(0.5)).train_metrics_clientapp
    with pytest.raises(UsageError, match=r"options\.inner"):
        start(fx.Average(0.25))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    whole = FedExP(checkpoint=tmp_path / "whole").start(FakeGrid(plain_app()), first_model(), 4)
    grid = FakeGrid(plain_app())
    for node in grid.nodes:
        node.fault = dies_on("train", 4)
    with pytest.raises(Killed):
        FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 4)
    newest = tmp_path / "run" / "checkpoint-3.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    with pytest.warns(RunWarning, match="resuming from the one before, of round 2"):
        result = FedExP(checkpoint=tmp_path / "run").start(FakeGrid(plain_app()), first_model(), 4)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(whole.arrays)["w"])


def test_a_folder_that_another_process_holds_is_waited_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = FedExP(checkpoint=tmp_path / "run")
    monkeypatch.setattr("fedexp.flower.checkpoint.LOCK_TIMEOUT", 0.1)

    def inside(round: int, arrays: ArrayRecord) -> None:
        with pytest.raises(UsageError, match="another process is working on"):
            strategy.start(FakeGrid(plain_app()), first_model(), 1)

    FedExP(checkpoint=tmp_path / "run").start(
        FakeGrid(plain_app()), first_model(), 1, evaluate_fn=inside
    )
    assert len(load_run(tmp_path / "run").rows) == 1


def test_a_metric_with_nan_in_a_list_is_stored_and_resumed(tmp_path: Path) -> None:
    """As of a class without examples: its run could neither be resumed nor read back."""

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 1.0, "per_class": [0.5, float("nan")]})

    def start(**faults: Any) -> Result:
        grid = FakeGrid(plain_app(), 3, **faults)
        strategy = FedAvg(fraction_evaluate=0.0, checkpoint=tmp_path / "run")
        return strategy.start(grid, first_model(), 3, evaluate_fn=evaluate)

    with pytest.raises(Killed):
        start(faults={0: dies_on("train", 3)})
    for result in (start(), start()):  # resumed, then read from the finished run
        for round in range(4):
            found: Any = result.evaluate_metrics_serverapp[round]["per_class"]
            np.testing.assert_array_equal(found, [0.5, np.nan])


def test_a_folder_below_the_home_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder named ~ was created in whatever directory the ServerApp had been started in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "flwr"):
        FedAvg(checkpoint="~/run").start(FakeGrid(plain_app(), 3), first_model(), 1)
    assert (tmp_path / "run" / RECORDS).exists()
    assert f"the run is stored in {tmp_path / 'run'}" in caplog.text


def test_restarts_do_not_renew_the_number_of_empty_rounds(tmp_path: Path) -> None:
    """Restarted often enough, a run whose clients all failed ended as finished."""
    for _ in range(4):
        grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), raises))
        with pytest.raises(NoRepliesError, match="3 rounds in a row"):
            FedAvg(checkpoint=tmp_path / "run").start(grid, first_model(), 5)
    assert len(load_run(tmp_path / "run").rows) == 2
    result = FedAvg(checkpoint=tmp_path / "run").start(FakeGrid(plain_app(), 3), first_model(), 5)
    assert [m["clients"] for m in result.train_metrics_clientapp.values()] == [0, 0, 3, 3, 3]


def test_names_of_clients_metrics_do_not_clash_with_columns(tmp_path: Path) -> None:
    def clashing_names(content: RecordDict) -> None:
        content.metric_records["metrics"].update({"round": 7, "accepted": 1.0, "trained": 2.0})

    def dies(message: Message, answer: Answer) -> Message | None:
        return dies_on("train", 3)(message, lambda: replies(clashing_names)(message, answer))  # type: ignore[arg-type,return-value]

    for fault, ends in ((dies, pytest.raises(Killed)), (replies(clashing_names), nullcontext())):
        with ends:
            grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), fault))
            result = FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 3)
    assert [row["round"] for row in load_run(tmp_path / "run").rows] == [1, 2, 3]
    assert result.train_metrics_clientapp[1]["round"] == 7


def test_remedies_are_those_of_a_strategy(tmp_path: Path) -> None:
    grid = FakeGrid(plain_app())
    for node in grid.nodes:
        node.fault = dies_on("train", 2)
    with pytest.raises(Killed):
        FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 4)
    (tmp_path / "run" / "checkpoint.json").write_text("{}")
    with pytest.raises(UsageError, match="remove the folder to start over"):
        FedExP(checkpoint=tmp_path / "run").start(FakeGrid(plain_app()), first_model(), 4)


@pytest.mark.parametrize(
    "part",
    [
        {"layout": []},
        {"layout": {"buffers": 7}},
        {"layout": {"buffers": ["x"], "tied": {}}},
        {"trained": [1]},
        {"trained": {"x": {}}},
        {"config": [[1]]},
        {"initial_config": [[1]]},
        {"nodes": {"a": 1}},
    ],
    ids=str,
)
def test_rows_that_no_run_has_written_are_refused_in_a_line(part: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    grid = FakeGrid(plain_app())
    for node in grid.nodes:
        node.fault = dies_on("train", 2)
    with pytest.raises(Killed):
        FedExP(checkpoint=folder).start(grid, first_model(), 4)
    records = folder / "records.jsonl"
    line = json.dumps({"round": 1, **part})
    records.write_text(line.ljust(records.stat().st_size - 1) + "\n")  # a checkpoint counts bytes
    newest = Checkpoint.from_json(json.loads((folder / NEWEST).read_bytes()))
    digest = hashlib.sha256(records.read_bytes()).hexdigest()
    write_json(folder / NEWEST, replace(newest, records_sha256=digest).to_json())
    with pytest.raises(UsageError, match=r"records\.jsonl is damaged: its rows are not"):
        FedExP(checkpoint=folder).start(FakeGrid(plain_app()), first_model(), 4)


def lost_from(bad: int, round: int, arrays: Any) -> Any:
    return MetricRecord({"loss": float("inf") if round >= bad else 1.0})


def test_a_diverged_run_stores_its_last_good_state(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DivergedError, match="diverged at round 5: test_loss is inf"):
            FedExP(checkpoint=tmp_path / "run").start(
                FakeGrid(plain_app()), first_model(), 6, evaluate_fn=partial(lost_from, 3)
            )
    stored = load_run(tmp_path / "run")
    assert stored.result is not None
    assert (stored.result["status"], len(stored.rows)) == ("diverged", 4)
    assert ["undone" in row for row in stored.rows] == [False, False, True, True]


def test_a_diverged_folder_resumes_from_its_last_good_state(
    tmp_path: Path, lines: list[str]
) -> None:
    folder, app = tmp_path / "run", plain_app()
    # a single node cannot be left out
    strategy = partial(FedExP, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    with pytest.raises(DivergedError, match="round 5"):
        strategy(checkpoint=folder).start(
            FakeGrid(app, 1), first_model(), 6, evaluate_fn=partial(lost_from, 3)
        )
    lines.clear()
    result = strategy(checkpoint=folder).start(FakeGrid(plain_app(), 1), first_model(), 6)
    assert [line for line in lines if "diverged at round 5" in line and "of round 4" in line]
    whole = strategy().start(FakeGrid(plain_app(), 1), first_model(), 4)  # 2 were undone
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(whole.arrays)["w"])
    assert load_run(folder).result["status"] == "finished"  # type: ignore[index]


def test_one_long_update_does_not_end_a_run(tmp_path: Path, lines: list[str]) -> None:
    grid = FakeGrid(plain_app(), 3, faults={BAD: only(HUGE, rounds=[3])})
    result = FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 4)
    assert result.train_metrics_clientapp[3]["dropped"] == 1
    assert any(f"node {grid.nodes[BAD].node_id}" in line and "2.2e+12" in line for line in lines)


def test_buffers_that_overflow_are_never_summed(tmp_path: Path, lines: list[str]) -> None:
    """Each of them is finite; their float32 sum is not."""
    large = replies(with_array("bn.running_mean", np.full(1, 3e38, np.float32)))
    grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), only(large, rounds=[2])))
    result = FedExP(checkpoint=tmp_path / "run").start(grid, first_model(), 3)
    dropped = [result.train_metrics_clientapp[round]["dropped"] for round in (1, 2, 3)]
    assert dropped == [0, 3, 0]
    assert any("the norm of its buffers is 3.0e+38" in line for line in lines)
