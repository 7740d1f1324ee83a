"""The algorithms of this package as Flower strategies: `from fedexp.flower import FedExP`.

One class per algorithm has its options as arguments. Each takes the ten arguments of Flower's
FedAvg first and in order, then, by name, the options of its rules (eps, beta, mu, ...) and those of
`RuleStrategy`. Those that Flower has too also take Flower's arguments, by Flower's names and
positions.

>>> FedExP(0.5, 1.0, 10, eps=0.01, seed=1).settings.algorithm
Algorithm(name='fedexp', client=SGD(), server=ExP(eps=0.01, ...), average_last=None, ...)
>>> FedAdam(eta=0.1, beta_1=0.8).settings.algorithm.server
Adam(lr=0.1, ...beta1=0.8, beta2=0.99)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Unpack

from fedexp import algorithms
from fedexp.algorithms import Algorithm
from fedexp.flower.strategy import RuleStrategy, StrategyOptions, strategy_arguments
from fedexp.server.adaptive import Form
from fedexp.server.extrapolation import EpsMode


class NamedStrategy(RuleStrategy):
    """Base of the strategies of one algorithm each.

    Attributes:
        make: the function of `fedexp.algorithms` that returns the algorithm.
    """

    make: ClassVar[Callable[..., Algorithm]]

    def _configure(self, arguments: Mapping[str, Any]) -> None:
        """Call the constructor of `RuleStrategy` with the arguments of a subclass's constructor."""
        make, default = type(self).make, type(self).make()
        rules: list[Any] = [default.client, default.server]
        names = [field.name for rule in rules for field in fields(rule)]
        algorithm = make(**{name: arguments[name] for name in names})
        algorithm = replace(algorithm, average_last=arguments["average_last"])
        super().__init__(algorithm=algorithm, **arguments["options"])


class FedAvg(NamedStrategy):
    """FedAvg with a server step size lr (McMahan et al., 2017)."""

    make = staticmethod(algorithms.fedavg)

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
        lr: float = 1.0,
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedExP(NamedStrategy):
    """FedExP (Algorithm 1): the server steps further when clients disagree.

    With eps it is the printed form; without, eps is relative to the mean squared norm of the
    updates, and there is nothing to tune (docs/extrapolation.md).
    """

    make = staticmethod(algorithms.fedexp)

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
        eps: float | None = None,
        factor: float = 2.0,
        clamp: bool = True,
        max_step: float = math.inf,
        eps_mode: EpsMode | None = None,
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedAvgM(NamedStrategy):
    """FedAvg with server momentum beta (Hsu et al., 2019)."""

    make = staticmethod(algorithms.fedavgm)
    flower_arguments: ClassVar[Mapping[str, str]] = {
        "server_learning_rate": "lr",
        "server_momentum": "beta",
    }
    flower_defaults: ClassVar[Mapping[str, float]] = {"server_momentum": 0.0}

    @strategy_arguments("server_learning_rate", "server_momentum")
    def __init__(
        self,
        *fedavg: Any,
        server_learning_rate: float | None = None,
        server_momentum: float | None = None,
        lr: float = 1.0,
        beta: float = 0.9,
        nesterov: bool = False,
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedExPM(NamedStrategy):
    """FedExP with server momentum beta (App. F)."""

    make = staticmethod(algorithms.fedexp_m)

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
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
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedProx(NamedStrategy):
    """FedProx (Li et al., 2020) with strength mu; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox)
    flower_arguments: ClassVar[Mapping[str, str]] = {"proximal_mu": "mu"}

    @strategy_arguments("proximal_mu")
    def __init__(
        self,
        *fedavg: Any,
        proximal_mu: float | None = None,
        mu: float = 0.1,
        lr: float = 1.0,
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedProxExP(NamedStrategy):
    """FedProx with extrapolation; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox_exp)

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
        mu: float = 0.1,
        eps: float = 0.001,
        factor: float = 2.0,
        clamp: bool = True,
        max_step: float = math.inf,
        eps_mode: EpsMode = "absolute",
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class Scaffold(FedAvg):
    """SCAFFOLD (Karimireddy et al., 2020), with the arguments of `FedAvg`; clients need
    `LocalRule`."""

    make = staticmethod(algorithms.scaffold)


class ScaffoldExP(NamedStrategy):
    """SCAFFOLD with extrapolation (Algorithm 2); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold_exp)

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
        eps: float = 0.001,
        factor: float = 2.0,
        clamp: bool = True,
        max_step: float = math.inf,
        eps_mode: EpsMode = "absolute",
        eps_decay: float = 1.0,
        decay_before_first_round: bool = False,
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedAdagrad(NamedStrategy):
    """FedAdagrad (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadagrad)
    flower_arguments: ClassVar[Mapping[str, str]] = {"eta": "lr", "eta_l": "", "tau": "tau"}

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
        eta: float | None = None,
        eta_l: float | None = None,
        lr: float = 0.1,
        tau: float = 0.001,
        form: Form = "standard",
        average_last: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedAdam(NamedStrategy):
    """FedAdam (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadam)
    flower_arguments: ClassVar[Mapping[str, str]] = {
        "eta": "lr",
        "eta_l": "",
        "beta_1": "beta1",
        "beta_2": "beta2",
        "tau": "tau",
    }
    flower_defaults: ClassVar[Mapping[str, float]] = {"eta": 0.1}

    @strategy_arguments()
    def __init__(
        self,
        *fedavg: Any,
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
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._configure(locals())


class FedYogi(FedAdam):
    """FedYogi (Reddi et al., 2021), with the arguments of `FedAdam`."""

    make = staticmethod(algorithms.fedyogi)
    flower_defaults: ClassVar[Mapping[str, float]] = {}


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
