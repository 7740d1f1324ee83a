"""Every fault of a client: it is left out, named and counted, and the model is that of the rest."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from fedexp.errors import DivergedError
from fedexp.flower import FedAvg, FedExP, Scaffold
from fedexp.flower.layout import ndarrays
from fedexp.flower.run import NoRepliesError
from tests.flower.helpers.fake_grid import FakeGrid, Fault, only, raises, replies, silent
from tests.flower.helpers.plain_app import DIM, first_model, plain_app

BAD = 1  # the position of the node that misbehaves


class Ear(logging.Handler):
    """Hears warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What Flower's logger says at warning and above."""
    ear = Ear()
    logging.getLogger("flwr").addHandler(ear)
    yield ear.heard
    logging.getLogger("flwr").removeHandler(ear)


def with_array(name: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content.array_records["arrays"][name] = Array(value)

    return change


def without_array(content: RecordDict) -> None:
    del content.array_records["arrays"]["w"]


def without_arrays(content: RecordDict) -> None:
    del content["arrays"]


def two_models(content: RecordDict) -> None:
    content["a"] = content["arrays"]
    content["b"] = content["arrays"]
    del content["arrays"]


def nonsense(content: RecordDict) -> None:
    content.array_records["arrays"]["w"] = Array("float32", (DIM,), "numpy.ndarray", b"nonsense")


def archive(content: RecordDict) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, w=np.zeros(DIM, np.float32))
    content.array_records["arrays"]["w"] = Array(
        "float32", (DIM,), "numpy.ndarray", buffer.getvalue()
    )


def with_metric(name: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content.metric_records["metrics"][name] = value

    return change


def without_weight(content: RecordDict) -> None:
    del content.metric_records["metrics"]["num-examples"]


def without_metrics(content: RecordDict) -> None:
    del content["metrics"]


NAN = np.full(DIM, np.nan, np.float32)
HUGE = np.full(DIM, np.inf, np.float32)
FAULTS: dict[str, tuple[Fault, str]] = {
    "an exception": (raises, "boom"),
    "nan": (replies(with_array("w", NAN)), r"not finite \('w'\)"),
    "infinity": (replies(with_array("w", HUGE)), r"not finite \('w'\)"),
    "nan in a buffer": (replies(with_array("bn.running_mean", NAN[:1])), "bn.running_mean"),
    "another shape": (replies(with_array("w", np.zeros(3, np.float32))), r"shape \(3,\)"),
    "another type": (replies(with_array("w", np.zeros(DIM, int))), "type int64"),
    "text": (replies(with_array("w", np.array(["a"] * DIM))), "type <U1"),
    "float64 beyond float32": (replies(with_array("w", np.full(DIM, 1e300))), "not finite"),
    "a name too many": (replies(with_array("v", np.zeros(1))), "'v' that the model has not"),
    "a name missing": (replies(without_array), "no array 'w'"),
    "no arrays": (replies(without_arrays), "0 records with a model"),
    "two models": (replies(two_models), "2 records with a model"),
    "bytes of nothing": (replies(nonsense), "cannot be read"),
    "an archive": (replies(archive), "not plain"),
}
WEIGHTS: dict[str, tuple[Fault, str]] = {
    "no weight": (replies(without_weight), "no 'num-examples'"),
    "no metrics": (replies(without_metrics), "no 'num-examples'"),
    "zero": (replies(with_metric("num-examples", 0)), "is 0, which is no weight"),
    "negative": (replies(with_metric("num-examples", -4)), "is -4"),
    "nan": (replies(with_metric("num-examples", float("nan"))), "is nan"),
    "infinite": (replies(with_metric("num-examples", float("inf"))), "is inf"),
    "a list": (replies(with_metric("num-examples", [1, 2])), "which is no weight"),
}


def check_left_out(fault: Fault, says: str, lines: list[str], weighting: Any) -> None:
    """The run must be that of the other nodes alone; the line names the node."""
    options: dict[str, Any] = {"weighting": weighting, "min_available_nodes": 2}
    grid = FakeGrid(plain_app(), 4, faults={BAD: only(fault)})
    result = FedExP(**options).start(grid, first_model(), 2, timeout=5)
    others = [{"partition-id": k} for k in range(4) if k != BAD]
    expected = FedExP(**options).start(FakeGrid(plain_app(), others), first_model(), 2)
    for name, value in ndarrays(expected.arrays).items():
        np.testing.assert_allclose(ndarrays(result.arrays)[name], value, rtol=1e-6, atol=1e-7)
    told = result.train_metrics_clientapp[2]
    assert (told["clients"], told["dropped"], told["unanswered"]) == (3, 1, 0)
    named = [line for line in lines if str(grid.nodes[BAD].node_id) in line]
    assert len(named) == 2  # one a round
    assert re.search(says, named[0]), named[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_reply_is_left_out(name: str, lines: list[str]) -> None:
    check_left_out(*FAULTS[name], lines, "uniform")


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_none_leaves_its_client_out(name: str, lines: list[str]) -> None:
    check_left_out(*WEIGHTS[name], lines, "num-examples")


def test_uniform_weights_need_no_number_of_examples() -> None:
    grid = FakeGrid(plain_app(), 3, faults={BAD: only(replies(without_weight))})
    result = FedExP(weighting="uniform").start(grid, first_model(), 1)
    told = result.train_metrics_clientapp[1]
    assert told["clients"] == 3
    assert told["train_loss"] == 1.0  # where one does not tell its weight, all count the same


def test_scaffold_leaves_out_clients_that_do_not_tell_their_control(lines: list[str]) -> None:
    grid = FakeGrid(plain_app(), 3)
    with pytest.raises(NoRepliesError, match="no usable reply in 3 rounds"):
        Scaffold().start(grid, first_model(), 5)
    assert "which Scaffold needs; use fedexp.flower.LocalRule" in lines[-1]


def test_a_round_without_replies_leaves_the_model_and_goes_on() -> None:
    faults = {k: only(raises, rounds=[2]) for k in range(3)}
    result = FedAvg().start(FakeGrid(plain_app(), 3, faults=faults), first_model(), 3)
    expected = FedAvg().start(FakeGrid(plain_app(), 3), first_model(), 2)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])
    assert result.train_metrics_clientapp[2]["clients"] == 0
    assert "server_lr" not in result.train_metrics_clientapp[2]


def test_empty_rounds_in_a_row_end_the_run() -> None:
    faults = {k: only(raises, rounds=range(2, 9)) for k in range(3)}
    grid = FakeGrid(plain_app(), 3, faults=faults)
    with pytest.raises(NoRepliesError, match="2 rounds in a row"):
        FedAvg(max_empty_rounds=2).start(grid, first_model(), 9)
    assert grid.sent.count(("train", 0)) == 3


def test_a_silent_node_is_waited_for_until_the_timeout_only() -> None:
    grid = FakeGrid(plain_app(), 3, faults={BAD: only(silent)})
    result = FedAvg().start(grid, first_model(), 1, timeout=0.3)
    told = result.train_metrics_clientapp[1]
    assert (told["clients"], told["dropped"], told["unanswered"]) == (2, 0, 1)


def test_a_broken_evaluation_costs_nothing_but_its_numbers(lines: list[str]) -> None:
    faults = {BAD: only(raises, kind="evaluate"), 0: only(silent, kind="evaluate")}
    result = FedAvg().start(FakeGrid(plain_app(), 3, faults=faults), first_model(), 1, timeout=0.3)
    alone = FedAvg(min_train_nodes=1, min_available_nodes=1).start(
        FakeGrid(plain_app(), [{"partition-id": 2}]), first_model(), 1
    )
    assert result.train_metrics_clientapp[1]["clients"] == 3
    assert result.evaluate_metrics_clientapp[1].keys() == alone.evaluate_metrics_clientapp[1].keys()
    assert sum("left out of the evaluation" in line for line in lines) == 2


def test_metrics_that_are_not_finite_do_not_spoil_the_mean() -> None:
    fault = only(replies(with_metric("train_loss", float("nan"))))
    result = FedAvg().start(FakeGrid(plain_app(), 3, faults={2: fault}), first_model(), 1)
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(20 / 30)


def test_a_model_that_diverges_ends_the_run_with_its_round() -> None:
    with pytest.raises(DivergedError, match=r"round 1.*lower the local or server learning rate"):
        FedAvg(lr=1e12).start(FakeGrid(plain_app(), 3), first_model(), 2)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": float("nan") if round == 2 else 1.0})

    with pytest.raises(DivergedError, match="round 2: test_loss is nan"):
        FedAvg().start(FakeGrid(plain_app(), 3), first_model(), 3, evaluate_fn=evaluate)
