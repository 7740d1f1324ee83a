"""Strategies: the numbers of the simulator, the arguments of Flower's own, and subclasses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi, Strategy
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedAvgM as FlowerFedAvgM
from flwr.serverapp.strategy import FedProx as FlowerFedProx

import fedexp as fx
import fedexp.flower
from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError
from fedexp.flower import (
    STRATEGIES,
    FedAvg,
    FedAvgM,
    FedExP,
    RuleStrategy,
    Scaffold,
    initial_arrays,
)
from fedexp.flower.layout import ndarrays
from fedexp.flower.strategy import StrategyOptions
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.plain_app import first_model, plain_app
from tests.flower.helpers.user_app import float64_task, simulated_app
from tests.helpers.problems import least_squares

ROUNDS = 3


FLOWERS: dict[str, type[FlowerFedAvg]] = {
    "FedAvg": FlowerFedAvg,
    "FedAvgM": FlowerFedAvgM,
    "FedProx": FlowerFedProx,
    "FedAdagrad": FedAdagrad,
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("cohort", [4, 2])
def test_every_strategy_gives_the_numbers_of_the_simulator(name: str, cohort: int) -> None:
    task = least_squares()
    records = list(fx.simulate(task, ALGORITHMS[name](), ROUNDS, cohort, seed=5, engine="loop"))
    options: dict[str, Any] = {"seed": 5, "query_client_ids": True, "weighting": "uniform"}
    strategy = STRATEGIES[name](cohort / 4, 0.0, min_available_nodes=4, **options)
    grid = FakeGrid(simulated_app(task, seed=5), 4)
    result = strategy.start(grid, initial_arrays(task, seed=5), ROUNDS)
    for record in records:
        metrics = result.train_metrics_clientapp[record.round]
        assert metrics["server_lr"] == pytest.approx(record.server_lr, rel=1e-6)
        assert metrics["clients"] == record.clients
        for metric, value in record.metrics.items():
            assert metrics[metric] == pytest.approx(value, rel=1e-5)
    params, _ = records[-1].state.output()
    np.testing.assert_allclose(ndarrays(result.arrays)["params"], params, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
def test_models_with_batchnorm_and_weights_by_size(weighting: Any) -> None:
    """The number of examples of the clients weighs mean and norms alike, as in the simulator."""
    task = float64_task()
    size = "size" if weighting == "num-examples" else "uniform"
    *_, last = fx.simulate(task, fx.fedexp(), ROUNDS, weighting=size, engine="loop")  # type: ignore[arg-type]
    strategy = FedExP(fraction_evaluate=0.0, weighting=weighting)
    result = strategy.start(FakeGrid(simulated_app(task), 4), initial_arrays(task), ROUNDS)
    metrics = result.train_metrics_clientapp[ROUNDS]
    assert metrics["server_lr"] == pytest.approx(last.server_lr, rel=1e-9)
    module = task.objective.load(*last.state.output())  # type: ignore[attr-defined]
    for name, value in module.state_dict().items():
        found = ndarrays(result.arrays)[name]
        np.testing.assert_allclose(found, value, rtol=1e-9, err_msg=name)


def test_fedavg_is_flowers_own() -> None:
    """A plain ClientApp, which knows nothing of us, needs no change: not even for its weights."""
    options: dict[str, Any] = {"fraction_evaluate": 1.0, "min_available_nodes": 4}
    ours = FedAvg(**options).start(FakeGrid(plain_app(), 4), first_model(), ROUNDS)
    theirs = FlowerFedAvg(**options).start(FakeGrid(plain_app(), 4), first_model(), ROUNDS)
    for name in ("w", "bn.running_mean"):
        mine, other = ndarrays(ours.arrays)[name], ndarrays(theirs.arrays)[name]
        np.testing.assert_allclose(mine, other, rtol=1e-6)
    for round in range(1, ROUNDS + 1):
        metrics = ours.train_metrics_clientapp[round]
        assert metrics["train_loss"] == pytest.approx(
            theirs.train_metrics_clientapp[round]["train_loss"]
        )
        assert ours.evaluate_metrics_clientapp[round]["loss"] == pytest.approx(
            theirs.evaluate_metrics_clientapp[round]["loss"]
        )


def test_integer_arrays_are_unchanged_and_statistics_averaged() -> None:
    result = FedExP(weighting="uniform").start(FakeGrid(plain_app(), 3), first_model(), 2)
    arrays = ndarrays(result.arrays)
    assert arrays["bn.num_batches_tracked"] == 0
    assert arrays["bn.num_batches_tracked"].dtype == np.int64
    assert arrays["bn.running_mean"].tolist() == [1.0]  # the mean of 0, 1 and 2, not beyond it


def test_evaluation_and_result_are_of_the_output_and_training_of_the_last_iterate() -> None:
    grid, sent, evaluated = FakeGrid(plain_app(), 3), list[Any](), list[Any]()

    def tap(message: Message) -> None:
        if message.metadata.dst_node_id == grid.nodes[0].node_id:
            where = {"train": sent, "evaluate": evaluated}[message.metadata.message_type]
            where.append(message.content.array_records["arrays"]["w"].numpy())

    grid.taps.append(tap)
    central: list[Any] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        central.append(arrays["w"].numpy())
        return MetricRecord({"accuracy": 0.5})

    result = FedExP(eps=0).start(grid, first_model(), ROUNDS, evaluate_fn=evaluate)
    assert result.evaluate_metrics_serverapp.keys() == {0, 1, 2, 3}
    np.testing.assert_allclose(central[1], sent[1])  # after one round the mean is that iterate
    np.testing.assert_allclose(central[2], (sent[1] + sent[2]) / 2, rtol=1e-6)
    assert not np.allclose(central[2], sent[2])
    for server, client in zip(central[1:], evaluated, strict=True):
        np.testing.assert_array_equal(server, client)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], central[3])


def test_strategies_take_fedavgs_arguments_first_and_in_order() -> None:
    theirs = list(signature(FlowerFedAvg).parameters)
    for strategy in STRATEGIES.values():
        ours = list(signature(strategy).parameters.values())
        assert [each.name for each in ours[:10]] == theirs
        flowers = len(signature(FLOWERS.get(strategy.__name__, FlowerFedAvg)).parameters)
        assert all(each.kind is each.KEYWORD_ONLY for each in ours[flowers:])
        assert (
            signature(strategy.start).parameters.keys()
            == signature(Strategy.start).parameters.keys()
        )
    assert STRATEGIES.keys() <= ALGORITHMS.keys()


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - STRATEGIES.keys()))
def test_other_algorithms_are_given_to_a_rule_strategy(name: str) -> None:
    """Or refused, where the client rule is not one of Flower's."""
    algorithm = ALGORITHMS[name]()
    if name in ("fednova", "fedexprox-stops"):
        with pytest.raises(UsageError, match="on Flower the client rule is SGD, Prox or Scaffold"):
            RuleStrategy(algorithm=algorithm)
    else:
        assert RuleStrategy(algorithm=algorithm).settings.algorithm == algorithm


@pytest.mark.parametrize("name", STRATEGIES)
def test_signatures_show_every_option_with_the_defaults_of_the_rules(name: str) -> None:
    strategy, algorithm = STRATEGIES[name], ALGORITHMS[name]()
    found = signature(strategy).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in found.values())
    assert all(each.kind is not each.VAR_POSITIONAL for each in found.values())
    assert all(each.annotation is not each.empty for each in found.values())
    rules: list[Any] = [algorithm.client, algorithm.server]
    options = {each.name: getattr(rule, each.name) for rule in rules for each in fields(rule)}
    options["average_last"] = algorithm.average_last
    common = {n: p for n, p in signature(RuleStrategy).parameters.items() if n != "algorithm"}
    assert common.keys() == StrategyOptions.__annotations__.keys()  # which type checkers read
    theirs = {n for n in strategy.flower_arguments if n not in options}
    assert found.keys() == {*common, *options, *theirs}
    build: Any = strategy
    assert build().settings.algorithm == algorithm
    given = signature(ALGORITHMS[name]).parameters  # where None depends on other arguments
    defaults = options | {n: None for n in options if n in given and given[n].default is None}
    assert {option: found[option].default for option in options} == defaults
    assert {each: found[each] for each in common} == common
    assert all(found[each].default is None for each in theirs)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FedAvg": ({}, {"lr": 1.0}),
    "FedAvgM": (
        {"server_learning_rate": 0.5, "server_momentum": 0.8},
        {"lr": 0.5, "beta": 0.8},
    ),
    "FedProx": ({"proximal_mu": 0.25}, {"mu": 0.25}),
    "FedAdagrad": ({"eta": 0.5, "eta_l": 0.2, "tau": 0.01}, {"lr": 0.5, "tau": 0.01}),
    "FedAdam": (
        {"eta": 0.5, "eta_l": 0.2, "beta_1": 0.8, "beta_2": 0.9, "tau": 0.01},
        {"lr": 0.5, "beta1": 0.8, "beta2": 0.9, "tau": 0.01},
    ),
    "FedYogi": (
        {"eta": 0.5, "eta_l": 0.2, "beta_1": 0.8, "beta_2": 0.9, "tau": 0.01},
        {"lr": 0.5, "beta1": 0.8, "beta2": 0.9, "tau": 0.01},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_flowers_own_call_means_the_same_here(name: str) -> None:
    """Every argument of Flower's strategy of that name, in Flower's order where it has one."""
    theirs, ours = FLOWERS[name], getattr(fedexp.flower, name)
    first: dict[str, Any] = {
        "fraction_train": 0.5,
        "fraction_evaluate": 0.25,
        "min_train_nodes": 3,
        "min_evaluate_nodes": 4,
        "min_available_nodes": 5,
        "weighted_by_key": "weight",
        "arrayrecord_key": "model",
        "configrecord_key": "settings",
        "train_metrics_aggr_fn": None,
        "evaluate_metrics_aggr_fn": None,
    }
    given = first | CALLS[name][0]
    assert given.keys() == signature(theirs).parameters.keys()
    theirs(**given)
    made = [ours(**given)]
    if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature(theirs).parameters.values()):
        made.append(ours(*given.values()))
    for strategy in made:
        rules = vars(strategy.settings.algorithm.client) | vars(strategy.settings.algorithm.server)
        assert CALLS[name][1].items() <= rules.items()
        assert (strategy.fraction_train, strategy.min_available_nodes) == (0.5, 5)
        assert strategy.arrayrecord_key == "model"


def test_flowers_call_of_fedavgm_trains_the_same_model() -> None:
    given: dict[str, Any] = {"server_learning_rate": 0.5, "server_momentum": 0.8}
    ends = []
    for make in (FedAvgM, FlowerFedAvgM):
        result = make(**given).start(FakeGrid(plain_app(), 4), first_model(), ROUNDS)
        ends.append(ndarrays(result.arrays)["w"])
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6, atol=1e-7)


def test_flowers_call_without_a_value_that_differs_here_is_warned_of(lines: list[str]) -> None:
    FedAvgM(server_learning_rate=1.0)
    assert lines == [
        "server_momentum is 0.9 here, where it is 0.0 in Flower's FedAvgM; give the value that you "
        "rely on"
    ]
    fedexp.flower.FedAdam(eta_l=0.1)
    assert "eta is 0.01 here, where it is 0.1 in Flower's FedAdam" in lines[1]
    FedAvgM(server_learning_rate=1.0, server_momentum=0.9)
    FedAvgM(server_learning_rate=1.0, beta=0.9)
    FedAvgM(lr=0.5)
    fedexp.flower.FedAdam(eta=0.1, tau=0.1)
    fedexp.flower.FedAdam(tau=0.1)
    fedexp.flower.FedYogi(eta_l=0.1)
    assert len(lines) == 2


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"])
def test_defaults_that_differ_from_flowers_are_listed(name: str) -> None:
    ours, theirs = getattr(fedexp.flower, name), FLOWERS[name]
    here, there = (signature(kind).parameters for kind in (ours, theirs))
    differing = {
        alias: there[alias].default
        for alias, option in ours.flower_arguments.items()
        if option and there[alias].default != here[option].default
    }
    assert ours.flower_defaults == differing


def test_options_of_the_rules_are_taken_by_name() -> None:
    strategy = Scaffold(0.5, lr=0.5, average_last=3, seed=7)
    assert strategy.settings.algorithm == fx.Algorithm(
        "scaffold", client=fx.Scaffold(), server=fx.Average(0.5), average_last=3
    )
    assert (strategy.fraction_train, strategy.settings.seed) == (0.5, 7)


class Decaying(FedExP):
    """What people write: another config as rounds go by, and a look at the replies."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = float(config["lr"]) * 0.5  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.seen = len(replies)
        return super().aggregate_train(server_round, replies)


def test_strategies_can_be_subclassed_as_flowers_can() -> None:
    grid, rates = FakeGrid(plain_app(), 3), set[Any]()
    grid.taps.append(
        lambda m: rates.update(r["lr"] for r in m.content.config_records.values() if "lr" in r)
    )
    strategy = Decaying(fraction_evaluate=0.0)
    strategy.start(grid, first_model(), 2, train_config=ConfigRecord({"lr": 1.0}))
    assert rates == {0.5, 0.25}
    assert strategy.seen == 3


class EveryNode(FedExP):
    """A configure_train of one's own, written as for Flower's strategies."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return [Message(content, node, "train") for node in grid.get_node_ids()]


def test_a_configure_train_of_ones_own_sends_the_iterate_that_updates_are_taken_from() -> None:
    """It got the mean of two iterates, so every update had half of the last step added to it."""
    starts = [
        make(eps=0.0, fraction_evaluate=0.0).start(FakeGrid(plain_app(), 3), first_model(), ROUNDS)
        for make in (FedExP, EveryNode)
    ]
    steps = [[each["server_lr"] for each in r.train_metrics_clientapp.values()] for r in starts]
    assert steps[0] == steps[1]
    ours, theirs = (ndarrays(result.arrays)["w"] for result in starts)
    np.testing.assert_array_equal(ours, theirs)


def test_flowers_own_loop_works_too() -> None:
    """Whoever calls configure_train and aggregate_train himself gets the same model."""
    ours = FedExP().start(FakeGrid(plain_app(), 3), first_model(), ROUNDS)
    theirs = Strategy.start(FedExP(), FakeGrid(plain_app(), 3), first_model(), ROUNDS)
    np.testing.assert_array_equal(ndarrays(ours.arrays)["w"], ndarrays(theirs.arrays)["w"])


def test_a_wrapper_that_changes_the_model_is_refused() -> None:
    strategy, grid = FedExP(), FakeGrid(plain_app(), 3)
    messages = strategy.configure_train(1, first_model(), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert arrays is not None
    noised = ArrayRecord({name: value + 1 for name, value in arrays.to_torch_state_dict().items()})
    with pytest.raises(UsageError, match="changed the model"):
        strategy.configure_train(2, noised, ConfigRecord(), grid)


def test_own_functions_for_metrics_see_no_arrays() -> None:
    def worst(records: list[RecordDict], key: str) -> MetricRecord:
        assert not any(record.array_records for record in records)
        assert key == "num-examples"
        losses: list[Any] = [record["metrics"]["train_loss"] for record in records]
        return MetricRecord({"worst": max(losses)})

    strategy = FedExP(train_metrics_aggr_fn=worst)
    result = strategy.start(FakeGrid(plain_app(), 3), first_model(), 1)
    assert result.train_metrics_clientapp[1]["worst"] == 2.0
    assert "server_lr" in result.train_metrics_clientapp[1]


def test_training_can_be_skipped() -> None:
    result = FedExP(fraction_train=0.0).start(FakeGrid(plain_app(), 3), first_model(), 1)
    np.testing.assert_array_equal(ndarrays(result.arrays)["w"], np.zeros(5))
    measured: Any = result.evaluate_metrics_clientapp[1]["loss"]
    assert measured > 0
