"""The folder of a run on Flower: what it refuses, what it mends, and what goes on with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

import fedexp as fx
from fedexp.errors import DivergedError, UsageError
from fedexp.flower import FedAvg, FedExP, RuleStrategy
from fedexp.flower.layout import ndarrays
from fedexp.runs import load_run
from fedexp.runs.folder import RunWarning
from tests.flower.helpers.fake_grid import Answer, FakeGrid, healthy, replies
from tests.flower.helpers.killing import Killed, dies_on
from tests.flower.helpers.plain_app import first_model, plain_app

ROUNDS = 4


@pytest.mark.parametrize(
    ("strategy", "arrays", "config", "says"),
    [
        (lambda f: FedExP(checkpoint=f, eps=1.0), None, {}, r"options\.eps is 0\.001, here it is"),
        (lambda f: FedExP(checkpoint=f, seed=1), None, {}, "there seed is 0, here it is 1"),
        (lambda f: FedAvg(checkpoint=f), None, {}, "there algorithm is fedexp, here it is fedavg"),
        (
            lambda f: FedExP(checkpoint=f),
            {"w": np.zeros(2, np.float32)},
            {},
            "there model is 3 arr",
        ),
        (lambda f: FedExP(checkpoint=f), None, {"lr": 0.5}, r"train_config\.lr is None, here"),
        (lambda f: FedExP(checkpoint=f, weighting="uniform"), None, {}, "weighting"),
        (lambda f: FedExP(checkpoint=f, max_norm=9.0), None, {}, r"options\.max_norm is None"),
        (lambda f: FedExP(checkpoint=f, min_replies=2), None, {}, r"options\.min_replies"),
    ],
)
def test_the_folder_of_another_run_is_refused_with_the_remedy(
    strategy: Any, arrays: Any, config: Any, says: str, tmp_path: Path
) -> None:
    FedExP(checkpoint=tmp_path / "run").start(FakeGrid(plain_app()), first_model(), 2)
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    model = first_model() if arrays is None else record_of(arrays)
    with pytest.raises(UsageError, match=says) as told:
        strategy(tmp_path / "run").start(
            FakeGrid(plain_app()), model, 2, train_config=ConfigRecord(config)
        )
    assert "choose another folder" in str(told.value)
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before


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


def test_a_config_that_changes_goes_on_as_it_was_left(tmp_path: Path) -> None:
    told = ConfigRecord({"lr": 1.0, "name": "mine"})
    heard: dict[int, Any] = {}

    def tap(message: Message) -> None:
        config: Any = message.content.config_records.get("config", {})
        heard[config.get("server-round", 0)] = config.get("lr")

    for last in (2, 3, None):
        grid = FakeGrid(plain_app())
        for node in grid.nodes:
            node.fault = dies_on("train", last) if last else healthy
        grid.taps.append(tap)
        strategy = Decaying(fraction_evaluate=0.0, checkpoint=tmp_path / "run")
        with pytest.raises(Killed) if last else nullcontext():
            strategy.start(grid, first_model(), ROUNDS, train_config=told)
    assert [heard[round] for round in range(1, ROUNDS + 1)] == [0.5, 0.25, 0.125, 0.0625]
    assert dict(told) == {"lr": 1.0, "name": "mine"}  # the caller's own stays as it is


@dataclass(frozen=True)
class Nested(fx.Average):
    """A rule of one's own, with options that a file has no words for."""

    inner: fx.Average | None = None
    bounds: tuple[float, ...] = (0.0, float("inf"))


def test_rules_with_any_options_can_be_kept_and_continued(tmp_path: Path) -> None:
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
    with pytest.warns(RunWarning, match="going on from the one before, of round 2"):
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


def test_names_of_clients_metrics_do_not_get_in_the_way(tmp_path: Path) -> None:
    def told(content: RecordDict) -> None:
        content.metric_records["metrics"].update({"round": 7, "accepted": 1.0, "trained": 2.0})

    def dies(message: Message, answer: Answer) -> Message | None:
        return dies_on("train", 3)(message, lambda: replies(told)(message, answer))  # type: ignore[arg-type,return-value]

    for fault, ends in ((dies, pytest.raises(Killed)), (replies(told), nullcontext())):
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
    with pytest.raises(UsageError, match="remove the folder to begin again"):
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
    with pytest.raises(UsageError, match=r"records\.jsonl is damaged: its rows are not"):
        FedExP(checkpoint=folder).start(FakeGrid(plain_app()), first_model(), 4)


def test_a_diverged_run_keeps_its_last_good_state_and_says_so_again(tmp_path: Path) -> None:
    def evaluate(round: int, arrays: Any) -> Any:
        return MetricRecord({"loss": float("inf") if round == 3 else 1.0})

    for _ in range(2):
        with pytest.raises(DivergedError, match="diverged at round 3: test_loss is inf"):
            FedExP(checkpoint=tmp_path / "run").start(
                FakeGrid(plain_app()), first_model(), 4, evaluate_fn=evaluate
            )
    stored = load_run(tmp_path / "run")
    assert stored.result is not None
    assert (stored.result["status"], len(stored.rows)) == ("diverged", 2)
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_bytes())["round"] == 2
