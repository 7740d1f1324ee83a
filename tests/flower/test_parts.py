"""Tied weights and float buffers: counted as the simulator counts them, whoever the clients are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.flower import (
    FedExP,
    RuleStrategy,
    SecureAggregation,
    initial_arrays,
    secure_mod,
    simulated_train,
)
from fedexp.flower.layout import apparent_ties, named_parts
from fedexp.flower.request import REPLY_INFO
from fedexp.flower.simulated_client import from_arrays
from fedexp.tasks import Task
from tests.flower.helpers.fake_grid import FakeGrid, only, raises, replies
from tests.flower.helpers.killing import Killed, dies_on
from tests.flower.helpers.user_app import (
    float64_task,
    loaded,
    plain_loop,
    plain_sgd,
    planned_batches,
)
from tests.flower.helpers.user_app import user_app as rule_app

ROUNDS = 3


class Tied(nn.Module):
    """One matrix under two names, and a float buffer that training changes."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        if self.training:
            self.centre = 0.5 * self.centre + 2.0 * hidden.detach().mean(dim=0)
        out: Tensor = self.last(hidden)
        return out


class OnlyTied(Tied):
    """The same with a buffer that never changes, so that nobody need know of it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        out: Tensor = self.last(hidden)
        return out


def planned_app(task: Task) -> ClientApp:
    app = ClientApp()
    app.train()(simulated_train(task))
    return app


def plain_app(task: Task) -> ClientApp:
    """An app without a line of this package's."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(str(context.node_config["partition-id"]))
        model = loaded(task, message)
        optimizer = plain_sgd(model)
        none: Any = None
        plain_loop(model, optimizer, none, planned_batches(task, message, client))
        metrics = MetricRecord({"num-examples": int(task.train.sizes[client])})
        content = RecordDict({"arrays": ArrayRecord(dict(model.state_dict()))})
        content["metrics"] = metrics
        return Message(content, reply_to=message)

    return app


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


APPS: dict[str, Callable[[Task], ClientApp]] = {"planned": planned_app, "LocalRule": rule_app}


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(eps=0.0), fx.fedprox_exp(eps=0.0), fx.scaffold_exp(eps=0.0)], ids=str
)
def test_clients_report_what_is_tied_and_what_is_a_buffer(
    app: str, algorithm: fx.Algorithm
) -> None:
    task = float64_task(Tied)
    check_is_the_simulator(task, APPS[app](task), algorithm)


def test_ties_of_plain_clients_are_found_by_their_values() -> None:
    task = float64_task(OnlyTied)
    check_is_the_simulator(task, plain_app(task), fx.fedexp(eps=0.0))


@pytest.mark.parametrize("by_names", [False, True])
def test_buffers_of_plain_clients_need_the_model_or_their_names(by_names: bool) -> None:
    task = float64_task(Tied)
    named: dict[str, Any] = {"buffers": ["centre"], "tied": {"second.weight": "first.weight"}}
    options = named if by_names else {"model": Tied()}
    check_is_the_simulator(task, plain_app(task), fx.fedexp(eps=0.0), **options)


def test_secure_sums_count_tied_weights_once() -> None:
    task = float64_task(Tied)
    records = list(fx.simulate(task, fx.fedexp(eps=0.0), ROUNDS, engine="loop"))
    strategy = FedExP(
        fraction_evaluate=0.0,
        eps=0.0,
        secure=SecureAggregation(clip=5.0, extras_bound=20.0),
        model=Tied(),
    )
    app = ClientApp(mods=[secure_mod])
    app.train()(simulated_train(task))
    result = strategy.start(FakeGrid(app, 4), initial_arrays(task), ROUNDS)
    steps = [result.train_metrics_clientapp[r.round]["server_lr"] for r in records]
    assert steps == pytest.approx([r.server_lr for r in records], rel=1e-3)


def test_the_layout_that_clients_reported_survives_a_restart(tmp_path: Path) -> None:
    task = float64_task(Tied)

    def start(folder: Path, **faults: Any) -> Any:
        grid = FakeGrid(planned_app(task), 4, **faults)
        strategy = FedExP(fraction_evaluate=0.0, eps=0.0, checkpoint=folder)
        return strategy.start(grid, initial_arrays(task), ROUNDS)

    whole = start(tmp_path / "whole")
    with pytest.raises(Killed):
        start(tmp_path / "run", faults=dict.fromkeys(range(4), dies_on("train", 3)))
    again = start(tmp_path / "run")
    for name, value in whole.arrays.items():
        assert again.arrays[name].data == value.data


def test_a_first_round_without_replies_leaves_the_layout_open() -> None:
    task = float64_task(Tied)
    faults = dict.fromkeys(range(4), only(raises, rounds=[1]))
    strategy = FedExP(fraction_evaluate=0.0)
    strategy.start(FakeGrid(planned_app(task), 4, faults=faults), initial_arrays(task), 2)
    assert strategy.run is not None
    layout = strategy.run.server.layout
    assert (layout.averaged, layout.tied) == (("centre",), {"second.weight": "first.weight"})


def test_arrays_that_only_begin_alike_are_not_tied() -> None:
    """A copy of a layer, e.g. of a teacher, that is trained on its own."""
    task = float64_task(OnlyTied)

    def parts(content: RecordDict) -> None:
        arrays = content.array_records["arrays"].to_torch_state_dict()
        arrays["second.weight"] = arrays["second.weight"] + 1.0
        content["arrays"] = ArrayRecord(arrays)

    grid = FakeGrid(plain_app(task), 4, faults=dict.fromkeys(range(4), only(replies(parts))))
    strategy = FedExP(fraction_evaluate=0.0)
    result = strategy.start(grid, initial_arrays(task), 1)
    assert result.arrays is not None
    arrays = result.arrays.to_torch_state_dict()
    assert not torch.equal(arrays["second.weight"], arrays["first.weight"])
    assert strategy.run is not None
    assert strategy.run.server.layout.tied == {}


def test_zeros_are_not_taken_for_tied_weights() -> None:
    """The two biases of a recurrent layer may begin and stay equal without being one."""
    drawn = np.random.default_rng(0).normal(size=3)
    arrays = {"a": np.zeros(3), "b": np.zeros(3), "c": drawn, "d": drawn, "e": drawn.reshape(3, 1)}
    assert apparent_ties(arrays) == {"d": "c"}


def test_a_client_that_reports_otherwise_than_most_is_left_out() -> None:
    task = float64_task(Tied)

    def contradict(content: RecordDict) -> None:
        content[REPLY_INFO] = ConfigRecord(
            {"rule": "sgd", "buffers": [], "tied": [], "tied-to": []}
        )

    def nonsense(content: RecordDict) -> None:
        names = {"buffers": ["no such"], "tied": ["first.weight"], "tied-to": ["first.bias"]}
        content[REPLY_INFO] = ConfigRecord({"rule": "sgd", **names})

    for faults in ({0: replies(nonsense), 3: replies(contradict)}, {0: replies(contradict)}):
        strategy = FedExP(fraction_evaluate=0.0)
        grid = FakeGrid(planned_app(task), 4, faults=faults)
        found = strategy.start(grid, initial_arrays(task), 1).train_metrics_clientapp[1]
        assert (found["clients"], found["dropped"]) == (4 - len(faults), len(faults))
        assert strategy.run is not None
        assert strategy.run.server.layout.averaged == ("centre",)


@pytest.mark.parametrize("kind", ["<U3", "|V4", "<c8", "|S2"])
def test_a_tied_array_that_holds_no_numbers_is_left_out(kind: str) -> None:
    """Numpy compares only numbers for being none, and raised: one reply ended the run."""
    task = float64_task(OnlyTied)

    def spoil(content: RecordDict) -> None:
        arrays = dict(content.array_records["arrays"])
        arrays["second.weight"] = Array(np.zeros(arrays["second.weight"].shape, kind))
        content["arrays"] = ArrayRecord(arrays)

    grid = FakeGrid(plain_app(task), 4, faults={1: replies(spoil)})
    found = FedExP(fraction_evaluate=0.0).start(grid, initial_arrays(task), 1)
    numbers = found.train_metrics_clientapp[1]
    assert (numbers["clients"], numbers["dropped"]) == (3, 1)


def test_a_module_names_its_parts() -> None:
    assert named_parts(Tied()) == (["centre"], {"second.weight": "first.weight"})


@pytest.mark.parametrize(
    "tied", [{"a": "b", "b": "c"}, {"a": "a"}, {"a": "other"}, {"a": "running_mean"}]
)
def test_ties_that_cannot_be_are_refused(tied: dict[str, str]) -> None:
    names = ("a", "b", "c", "running_mean")
    arrays = {name: torch.zeros(2) for name in names} | {"other": torch.zeros(3)}
    with pytest.raises(UsageError, match="cannot be tied"):
        FedExP(tied=tied).start(FakeGrid(ClientApp()), ArrayRecord(arrays), 1)
