"""Replies: damaged ones are left out, logged and counted; the first ones decide the layout."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fedexp as fx
from fedexp.flower import (
    FedAvg,
    FedExP,
    RuleStrategy,
    Scaffold,
    SecureAggregation,
    initial_arrays,
    secure_mod,
    simulated_train,
)
from fedexp.flower.layout import apparent_ties, ndarrays
from fedexp.flower.request import REPLY_INFO
from fedexp.flower.server import NoRepliesError
from fedexp.flower.simulated_client import from_arrays
from fedexp.tasks import Task
from tests.flower.helpers.fake_grid import (
    Answer,
    FakeGrid,
    Fault,
    Killed,
    dies_on,
    only,
    raises,
    replies,
    with_array,
    with_metric,
)
from tests.flower.helpers.plain_app import DIM, first_model, plain_app
from tests.flower.helpers.user_app import (
    ConstantBufferNet,
    TiedNet,
    float64_task,
    plain_task_app,
    simulated_app,
)
from tests.flower.helpers.user_app import user_app as rule_app

BAD = 1  # the position of the node that misbehaves
NAN = np.full(DIM, np.nan, np.float32)
HUGE = np.full(DIM, np.inf, np.float32)
HUGE_UPDATE = replies(with_array("w", np.full(DIM, 1e12, np.float32)))
ROUNDS = 3
APPS: dict[str, Callable[[Task], ClientApp]] = {"simulated": simulated_app, "LocalRule": rule_app}


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


def without_weight(content: RecordDict) -> None:
    del content.metric_records["metrics"]["num-examples"]


def without_metrics(content: RecordDict) -> None:
    del content["metrics"]


FAULTS: dict[str, tuple[Fault, str]] = {
    "an exception": (raises, "boom"),
    "nan": (replies(with_array("w", NAN)), r"not finite \('w'\)"),
    "infinity": (replies(with_array("w", HUGE)), r"not finite \('w'\)"),
    "nan in a buffer": (replies(with_array("bn.running_mean", NAN[:1])), "bn.running_mean"),
    "another shape": (replies(with_array("w", np.zeros(3, np.float32))), r"shape \(3,\)"),
    "another type": (replies(with_array("w", np.zeros(DIM, int))), "type int64"),
    "text": (replies(with_array("w", np.array(["a"] * DIM))), "type <U1"),
    "float64 beyond float32": (replies(with_array("w", np.full(DIM, 1e300))), "not finite"),
    "a name too many": (
        replies(with_array("v", np.zeros(1))),
        "'v', which the model does not have",
    ),
    "a name missing": (replies(without_array), "no array 'w'"),
    "no arrays": (replies(without_arrays), "0 records with a model"),
    "two models": (replies(two_models), "2 records with a model"),
    "bytes of nothing": (replies(nonsense), "cannot be read"),
    "an archive": (replies(archive), "not a plain one"),
}


WEIGHTS: dict[str, tuple[Fault, str]] = {
    "no weight": (replies(without_weight), "no 'num-examples'"),
    "no metrics": (replies(without_metrics), "no 'num-examples'"),
    "zero": (replies(with_metric("num-examples", 0)), "is 0, which is not a weight"),
    "negative": (replies(with_metric("num-examples", -4)), "is -4"),
    "nan": (replies(with_metric("num-examples", float("nan"))), "is nan"),
    "infinite": (replies(with_metric("num-examples", float("inf"))), "is inf"),
    "a list": (replies(with_metric("num-examples", [1, 2])), "which is not a weight"),
}


def check_left_out(fault: Fault, pattern: str, lines: list[str], weighting: Any) -> None:
    """The run must be that of the other nodes alone; the line names the node."""
    options: dict[str, Any] = {"weighting": weighting, "min_available_nodes": 2}
    grid = FakeGrid(plain_app(), 4, faults={BAD: only(fault)})
    result = FedExP(**options).start(grid, first_model(), 2, timeout=5)
    others = [{"partition-id": k} for k in range(4) if k != BAD]
    expected = FedExP(**options).start(FakeGrid(plain_app(), others), first_model(), 2)
    for name, value in ndarrays(expected.arrays).items():
        np.testing.assert_allclose(ndarrays(result.arrays)[name], value, rtol=1e-6, atol=1e-7)
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients"], metrics["dropped"], metrics["unanswered"]) == (3, 1, 0)
    named = [line for line in lines if str(grid.nodes[BAD].node_id) in line]
    assert len(named) == 2  # one per round
    assert re.search(pattern, named[0]), named[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_reply_is_left_out(name: str, lines: list[str]) -> None:
    check_left_out(*FAULTS[name], lines, "uniform")


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_none_leaves_its_client_out(name: str, lines: list[str]) -> None:
    check_left_out(*WEIGHTS[name], lines, "num-examples")


def test_uniform_weights_need_no_number_of_examples() -> None:
    grid = FakeGrid(plain_app(), 3, faults={BAD: only(replies(without_weight))})
    result = FedExP(weighting="uniform").start(grid, first_model(), 1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["clients"] == 3
    assert metrics["train_loss"] == 1.0  # where one does not report its weight, all count the same


def test_scaffold_leaves_out_clients_without_control_variate(lines: list[str]) -> None:
    grid = FakeGrid(plain_app(), 3)
    with pytest.raises(NoRepliesError, match="no usable reply in 3 rounds"):
        Scaffold().start(grid, first_model(), 5)
    assert "which Scaffold needs; use fedexp.flower.LocalRule" in lines[-1]


def test_an_update_beyond_the_bound_is_left_out(lines: list[str]) -> None:
    grid = FakeGrid(plain_app(), 4, faults={BAD: only(HUGE_UPDATE)})
    result = FedExP(max_norm=100.0).start(grid, first_model(), 2)
    others = [{"partition-id": k} for k in range(4) if k != BAD]
    expected = FedExP().start(FakeGrid(plain_app(), others), first_model(), 2)
    np.testing.assert_allclose(ndarrays(result.arrays)["w"], ndarrays(expected.arrays)["w"])
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients"], metrics["dropped"]) == (3, 1)
    assert any("2.24e+12, more than max_norm=100" in line for line in lines)


def test_replies_in_float64_are_cast() -> None:
    def widen(content: RecordDict) -> None:
        arrays = content.array_records["arrays"]
        for name in ("w", "bn.running_mean"):
            arrays[name] = Array(arrays[name].numpy().astype(np.float64))

    grid = FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), only(replies(widen))))
    result = FedExP().start(grid, first_model(), 2)
    expected = FedExP().start(FakeGrid(plain_app(), 3), first_model(), 2)
    for name, value in ndarrays(expected.arrays).items():
        np.testing.assert_array_equal(ndarrays(result.arrays)[name], value)
        assert ndarrays(result.arrays)[name].dtype == value.dtype


def test_the_weight_of_a_client_is_the_metric_that_is_named() -> None:
    def weigh(message: Message, answer: Answer) -> Message | None:
        reply = answer()
        metrics = reply.content.metric_records["metrics"]
        metrics["share"] = 1.0 / float(metrics.pop("num-examples"))  # type: ignore[arg-type]
        return reply

    def grid() -> FakeGrid:
        return FakeGrid(plain_app(), 3, faults=dict.fromkeys(range(3), weigh))

    ours = FedAvg(weighted_by_key="share").start(grid(), first_model(), 2)
    theirs = FlowerFedAvg(weighted_by_key="share").start(grid(), first_model(), 2)
    mine, other = ndarrays(ours.arrays)["w"], ndarrays(theirs.arrays)["w"]
    np.testing.assert_allclose(mine, other, rtol=1e-6)


def check_is_the_simulator(
    task: Task, app: ClientApp, algorithm: fx.Algorithm, **options: Any
) -> None:
    records = list(fx.simulate(task, algorithm, ROUNDS, engine="loop"))
    strategy = RuleStrategy(
        fraction_evaluate=0.0, algorithm=algorithm, weighting="uniform", **options
    )
    result = strategy.start(FakeGrid(app, 4), initial_arrays(task), ROUNDS)
    for record in records:
        found = result.train_metrics_clientapp[record.round]
        assert found["server_lr"] == pytest.approx(record.server_lr, rel=1e-9)
        assert found["mean_sq_norm"] == pytest.approx(record.metrics["mean_sq_norm"], rel=1e-9)
    assert result.arrays is not None
    params, buffers = from_arrays(task, result.arrays)
    expected, others = records[-1].state.output()
    torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(buffers.averaged, others.averaged, rtol=1e-10, atol=1e-10)
    arrays = result.arrays.to_torch_state_dict()
    assert torch.equal(arrays["first.weight"], arrays["second.weight"])


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(eps=0.0), fx.fedprox_exp(eps=0.0), fx.scaffold_exp(eps=0.0)], ids=str
)
def test_clients_report_what_is_tied_and_what_is_a_buffer(
    app: str, algorithm: fx.Algorithm
) -> None:
    task = float64_task(TiedNet)
    check_is_the_simulator(task, APPS[app](task), algorithm)


def test_ties_of_plain_clients_are_found_by_their_values() -> None:
    task = float64_task(ConstantBufferNet)
    check_is_the_simulator(task, plain_task_app(task), fx.fedexp(eps=0.0))


@pytest.mark.parametrize("by_names", [False, True])
def test_buffers_of_plain_clients_need_the_model_or_their_names(by_names: bool) -> None:
    task = float64_task(TiedNet)
    named: dict[str, Any] = {"buffers": ["centre"], "tied": {"second.weight": "first.weight"}}
    options = named if by_names else {"model": TiedNet()}
    check_is_the_simulator(task, plain_task_app(task), fx.fedexp(eps=0.0), **options)


def test_secure_sums_count_tied_weights_once() -> None:
    task = float64_task(TiedNet)
    records = list(fx.simulate(task, fx.fedexp(eps=0.0), ROUNDS, engine="loop"))
    strategy = FedExP(
        fraction_evaluate=0.0,
        eps=0.0,
        secure=SecureAggregation(clip=5.0, extras_bound=20.0),
        model=TiedNet(),
    )
    app = ClientApp(mods=[secure_mod])
    app.train()(simulated_train(task))
    result = strategy.start(FakeGrid(app, 4), initial_arrays(task), ROUNDS)
    steps = [result.train_metrics_clientapp[r.round]["server_lr"] for r in records]
    assert steps == pytest.approx([r.server_lr for r in records], rel=1e-3)


def test_the_layout_that_clients_reported_survives_a_restart(tmp_path: Path) -> None:
    task = float64_task(TiedNet)

    def start(folder: Path, **faults: Any) -> Any:
        grid = FakeGrid(simulated_app(task), 4, **faults)
        strategy = FedExP(fraction_evaluate=0.0, eps=0.0, checkpoint=folder)
        return strategy.start(grid, initial_arrays(task), ROUNDS)

    whole = start(tmp_path / "whole")
    with pytest.raises(Killed):
        start(tmp_path / "run", faults=dict.fromkeys(range(4), dies_on("train", 3)))
    again = start(tmp_path / "run")
    for name, value in whole.arrays.items():
        assert again.arrays[name].data == value.data


def test_a_first_round_without_replies_leaves_the_layout_undecided() -> None:
    task = float64_task(TiedNet)
    faults = dict.fromkeys(range(4), only(raises, rounds=[1]))
    strategy = FedExP(fraction_evaluate=0.0)
    strategy.start(FakeGrid(simulated_app(task), 4, faults=faults), initial_arrays(task), 2)
    assert strategy.run is not None
    layout = strategy.run.layout
    assert (layout.averaged, layout.tied) == (("centre",), {"second.weight": "first.weight"})


def test_zeros_are_not_taken_for_tied_weights() -> None:
    """The two biases of a recurrent layer may begin and stay equal without being one."""
    drawn = np.random.default_rng(0).normal(size=3)
    arrays = {"a": np.zeros(3), "b": np.zeros(3), "c": drawn, "d": drawn, "e": drawn.reshape(3, 1)}
    assert apparent_ties(arrays) == {"d": "c"}


def test_a_client_that_reports_otherwise_than_most_is_left_out() -> None:
    task = float64_task(TiedNet)

    def contradict(content: RecordDict) -> None:
        content[REPLY_INFO] = ConfigRecord(
            {"rule": "sgd", "buffers": [], "tied": [], "tied-to": []}
        )

    def nonsense(content: RecordDict) -> None:
        names = {"buffers": ["no such"], "tied": ["first.weight"], "tied-to": ["first.bias"]}
        content[REPLY_INFO] = ConfigRecord({"rule": "sgd", **names})

    for faults in ({0: replies(nonsense), 3: replies(contradict)}, {0: replies(contradict)}):
        strategy = FedExP(fraction_evaluate=0.0)
        grid = FakeGrid(simulated_app(task), 4, faults=faults)
        found = strategy.start(grid, initial_arrays(task), 1).train_metrics_clientapp[1]
        assert (found["clients"], found["dropped"]) == (4 - len(faults), len(faults))
        assert strategy.run is not None
        assert strategy.run.layout.averaged == ("centre",)


def reports(*buffers: str) -> Fault:
    def contradict(content: RecordDict) -> None:
        info: Any = {"rule": "sgd", "buffers": list(buffers), "tied": [], "tied-to": []}
        content[REPLY_INFO] = ConfigRecord(info)

    return only(replies(contradict), rounds=[1])


def test_a_tie_about_the_layout_is_refused_with_the_remedy(lines: list[str]) -> None:
    """The first reply decided it."""
    task = float64_task(TiedNet)
    strategy = FedExP(fraction_evaluate=0.0)
    grid = FakeGrid(simulated_app(task), 2, faults={0: reports()})
    rows = strategy.start(grid, initial_arrays(task), 2).train_metrics_clientapp
    assert [(rows[round]["clients"], rows[round]["dropped"]) for round in (1, 2)] == [
        (0, 2),
        (2, 0),
    ]
    refused = [line for line in lines if line.endswith("as another; give the strategy model=")]
    assert len(refused) == 2
    assert strategy.run is not None
    assert strategy.run.layout.averaged == ("centre",)


def test_further_replies_decide_where_the_first_three_disagree() -> None:
    task = float64_task(TiedNet)
    strategy = FedExP(fraction_evaluate=0.0)
    grid = FakeGrid(simulated_app(task), 4, faults={0: reports(), 1: reports("centre")})
    (row,) = strategy.start(grid, initial_arrays(task), 1).train_metrics_clientapp.values()
    assert (row["clients"], row["dropped"]) == (2, 2)
    assert strategy.run is not None
    assert strategy.run.layout.tied == {"second.weight": "first.weight"}


@pytest.mark.parametrize("kind", ["<U3", "|V4", "<c8", "|S2"])
def test_a_tied_array_without_numbers_is_left_out(kind: str) -> None:
    """Numpy compares only numbers for being none, and raised: one reply ended the run."""
    task = float64_task(ConstantBufferNet)

    def spoil(content: RecordDict) -> None:
        arrays = dict(content.array_records["arrays"])
        arrays["second.weight"] = Array(np.zeros(arrays["second.weight"].shape, kind))
        content["arrays"] = ArrayRecord(arrays)

    grid = FakeGrid(plain_task_app(task), 4, faults={1: replies(spoil)})
    found = FedExP(fraction_evaluate=0.0).start(grid, initial_arrays(task), 1)
    numbers = found.train_metrics_clientapp[1]
    assert (numbers["clients"], numbers["dropped"]) == (3, 1)
