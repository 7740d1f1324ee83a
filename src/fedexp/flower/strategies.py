"""The algorithms of this package as Flower strategies: `from fedexp.flower import FedExP`.

One class per algorithm has its options as arguments. Each takes FedAvg's ten arguments first and in
order, then, by name, the options of its rules (eps, beta, mu, ...) and those of `RuleStrategy`.
Those that Flower has too also take Flower's arguments, by Flower's names and positions. Signatures
are written out, so that editors and type checkers show them.

>>> FedExP(0.5, 1.0, 10, eps=0.01, seed=1).settings.algorithm
Algorithm(name='fedexp', client=SGD(), server=ExP(eps=0.01, ...), average_last=None)
>>> FedAdam(eta=0.1, beta_1=0.8).settings.algorithm.server
Adam(lr=0.1, ...beta1=0.8, beta2=0.99)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import wraps
from inspect import Parameter, signature
from logging import INFO
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, ParamSpec

from flwr.supercore import log
from torch import nn

from fedexp import algorithms
from fedexp.algorithms import Algorithm
from fedexp.errors import require, unknown_name
from fedexp.flower.metrics import MetricsFn
from fedexp.flower.replies import Weighting
from fedexp.flower.rule_strategy import RuleStrategy
from fedexp.flower.secure_payload import SecureAggregation
from fedexp.privacy import Privacy
from fedexp.server.adaptive import Form
from fedexp.server.extrapolation import EpsMode

P = ParamSpec("P")


def strategy_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Refuse arguments that are unknown, given twice or no numbers, in a line with the remedy."""
    parameters = list(signature(init).parameters.values())[1:]
    known = [each.name for each in parameters]
    numbers = {each.name for each in parameters if each.annotation.startswith(("float", "int"))}
    by_position = [each.name for each in parameters if each.kind is not Parameter.KEYWORD_ONLY]

    @wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        strategy = args[0]
        assert isinstance(strategy, NamedStrategy)
        name = type(strategy).__name__
        for option in kwargs:
            if option not in known:
                raise unknown_name(f"option of {name}", option, known)
        require(
            len(args) - 1 <= len(by_position),
            f"{name} takes its further options by name, e.g. {known[len(by_position)]}=...",
        )
        given: dict[str, Any] = dict(zip(by_position, args[1:], strict=False))
        twice = next((option for option in given if option in kwargs), None)
        require(twice is None, f"{twice} is given twice: by position and by name")
        given |= kwargs
        for option, value in given.items():
            valid = option not in numbers or value is None or isinstance(value, Real)
            require(valid, f"{option} must be a number, not {value!r}")
        for theirs, ours in strategy.flower_arguments.items():
            both = theirs != ours and given.get(theirs) is not None and ours in given
            require(not both, f"{theirs} and {ours} are one option; give one of them")
        init(*args, **kwargs)

    return call


class NamedStrategy(RuleStrategy):
    """Base of the strategies with an algorithm of their own.

    Attributes:
        make: the function of `fedexp.algorithms` that returns the algorithm.
        flower_arguments: maps the arguments of Flower's strategy of this name to ours; "" for one
            that has no effect, as in Flower.
    """

    make: ClassVar[Callable[[], Algorithm]]
    flower_arguments: ClassVar[Mapping[str, str]] = {}

    def _configure(self, given: Mapping[str, Any]) -> None:
        """Call the constructor of `RuleStrategy` with the arguments of a subclass's own."""
        options = dict(given)
        for theirs, ours in self.flower_arguments.items():
            value = options[theirs]
            if value is not None and ours:
                options[ours] = value
            elif value is not None:
                log(INFO, "%s has no effect, as in Flower: clients choose it themselves", theirs)
        algorithm = _with_options(type(self).make(), options)
        common = {name: options[name] for name in COMMON}
        super().__init__(algorithm=algorithm, **common)


COMMON = tuple(each for each in signature(RuleStrategy).parameters if each != "algorithm")


def _with_options(algorithm: Algorithm, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm with the options of its two rules, and its own."""

    def of(rule: Any) -> dict[str, Any]:
        return {each.name: options[each.name] for each in fields(rule) if each.name in options}

    client: Any = algorithm.client
    server: Any = algorithm.server
    return replace(
        algorithm,
        client=replace(client, **of(client)),
        server=replace(server, **of(server)),
        average_last=options["average_last"],
    )


_MOMENTS = {"eta": "lr", "eta_l": "", "beta_1": "beta1", "beta_2": "beta2", "tau": "tau"}


class FedAvg(NamedStrategy):
    """FedAvg with a server step size lr (McMahan et al., 2017)."""

    make = staticmethod(algorithms.fedavg)

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        lr: float = 1.0,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedExP(NamedStrategy):
    """FedExP (Algorithm 1): the server steps further when clients disagree.

    With eps it is the printed form; without, eps is relative to the mean squared norm of the
    updates, and there is nothing to tune (docs/extrapolation.md).
    """

    make = staticmethod(algorithms.fedexp)

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        eps: float | None = None,
        factor: float = 2.0,
        clamp: bool = True,
        max_step: float = math.inf,
        eps_mode: EpsMode | None = None,
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        given = dict(locals())
        given["eps"], given["eps_mode"] = algorithms.eps_and_mode(eps, eps_mode)
        self._configure(given)


class FedAvgM(NamedStrategy):
    """FedAvg with server momentum beta (Hsu et al., 2019)."""

    make = staticmethod(algorithms.fedavgm)
    flower_arguments: ClassVar[Mapping[str, str]] = {
        "server_learning_rate": "lr",
        "server_momentum": "beta",
    }

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        server_learning_rate: float | None = None,
        server_momentum: float | None = None,
        *,
        lr: float = 1.0,
        beta: float = 0.9,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedExPM(NamedStrategy):
    """FedExP with server momentum beta (App. F)."""

    make = staticmethod(algorithms.fedexp_m)

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        eps: float = 0.001,
        factor: float = 2.0,
        clamp: bool = False,
        max_step: float = math.inf,
        eps_mode: EpsMode = "absolute",
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        beta: float = 0.9,
        apply_momentum: bool = True,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedProx(NamedStrategy):
    """FedProx (Li et al., 2020) with strength mu; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox)
    flower_arguments: ClassVar[Mapping[str, str]] = {"proximal_mu": "mu"}

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        proximal_mu: float | None = None,
        *,
        mu: float = 0.1,
        lr: float = 1.0,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedProxExP(NamedStrategy):
    """FedProx with extrapolation; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox_exp)

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        mu: float = 0.1,
        eps: float = 0.001,
        factor: float = 2.0,
        clamp: bool = True,
        max_step: float = math.inf,
        eps_mode: EpsMode = "absolute",
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class Scaffold(NamedStrategy):
    """SCAFFOLD (Karimireddy et al., 2020); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold)

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        lr: float = 1.0,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class ScaffoldExP(NamedStrategy):
    """SCAFFOLD with extrapolation (Algorithm 2); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold_exp)

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        eps: float = 0.001,
        factor: float = 2.0,
        clamp: bool = True,
        max_step: float = math.inf,
        eps_mode: EpsMode = "absolute",
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedAdagrad(NamedStrategy):
    """FedAdagrad (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadagrad)
    flower_arguments: ClassVar[Mapping[str, str]] = {"eta": "lr", "eta_l": "", "tau": "tau"}

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        eta: float | None = None,
        eta_l: float | None = None,
        lr: float = 0.1,
        tau: float = 0.001,
        form: Form = "standard",
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedAdam(NamedStrategy):
    """FedAdam (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadam)
    flower_arguments: ClassVar[Mapping[str, str]] = _MOMENTS

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        eta: float | None = None,
        eta_l: float | None = None,
        beta_1: float | None = None,
        beta_2: float | None = None,
        lr: float = 0.01,
        tau: float = 0.001,
        form: Form = "standard",
        beta1: float = 0.9,
        beta2: float = 0.99,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


class FedYogi(NamedStrategy):
    """FedYogi (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedyogi)
    flower_arguments: ClassVar[Mapping[str, str]] = _MOMENTS

    @strategy_arguments
    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
        *,
        eta: float | None = None,
        eta_l: float | None = None,
        beta_1: float | None = None,
        beta_2: float | None = None,
        lr: float = 0.01,
        tau: float = 0.001,
        form: Form = "standard",
        beta1: float = 0.9,
        beta2: float = 0.99,
        average_last: int | None = None,
        weighting: Weighting | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
        buffers: Collection[str] | None = None,
        tied: Mapping[str, str] | None = None,
        checkpoint: str | Path | None = None,
        name: str = "flower",
        total_clients: int | None = None,
        wait_for_nodes: float | None = None,
        max_empty_rounds: int = 3,
        max_norm: float | None = None,
        min_replies: int = 1,
        query_client_ids: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._configure(locals())


STRATEGIES: dict[str, type[NamedStrategy]] = {
    "fedavg": FedAvg,
    "fedexp": FedExP,
    "fedavgm": FedAvgM,
    "fedexp-m": FedExPM,
    "fedprox": FedProx,
    "fedprox-exp": FedProxExP,
    "scaffold": Scaffold,
    "scaffold-exp": ScaffoldExP,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}
"""Strategies by the name of their algorithm."""
