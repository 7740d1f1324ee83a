"""The algorithms by name, as strategies: `from fedexp.flower import FedExP` is all that changes.

Each takes FedAvg's ten arguments first and in order, then, by name, the options of its rules (eps,
beta, mu, ...) and those of `RuleStrategy`. Those that Flower has too also take Flower's arguments,
by Flower's names and at their places.

>>> FedExP(0.5, 1.0, 10, eps=0.01, seed=1).settings.algorithm
Algorithm(name='fedexp', client=SGD(), server=ExP(eps=0.01, ...), average_last=None)
>>> FedAdam(eta=0.1, beta_1=0.8).settings.algorithm.server
Adam(lr=0.1, ...beta1=0.8, beta2=0.99)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from logging import INFO
from typing import Any, ClassVar

from flwr.supercore import log

from fedexp import algorithms
from fedexp.algorithms import Algorithm
from fedexp.errors import UsageError, require, unknown_name
from fedexp.flower.strategy import RuleStrategy


def _options(algorithm: Algorithm) -> dict[str, Any]:
    """The options of an algorithm with their values: those of its two rules, and its own."""
    rules: tuple[Any, Any] = (algorithm.client, algorithm.server)
    found = {each.name: getattr(rule, each.name) for rule in rules for each in fields(rule)}
    return {**found, "average_last": algorithm.average_last}


def _with_options(algorithm: Algorithm, options: dict[str, Any]) -> Algorithm:
    def of(rule: Any) -> dict[str, Any]:
        return {each.name: options[each.name] for each in fields(rule) if each.name in options}

    client: Any = algorithm.client
    server: Any = algorithm.server
    return replace(
        algorithm,
        client=replace(client, **of(client)),
        server=replace(server, **of(server)),
        average_last=options.get("average_last", algorithm.average_last),
    )


def _fedavg() -> list[Parameter]:
    given = signature(RuleStrategy).parameters.values()
    return [each for each in given if each.kind is Parameter.POSITIONAL_OR_KEYWORD]


def _signature(options: dict[str, Any], flowers: Mapping[str, str], in_order: bool) -> Signature:
    """Return FedAvg's arguments, Flower's own of this strategy (by place too where Flower takes
    them so), the options of the rules, then those of every strategy."""
    kind = Parameter.POSITIONAL_OR_KEYWORD if in_order else Parameter.KEYWORD_ONLY
    theirs = [Parameter(n, kind, default=None) for n in flowers if n not in options]
    rules = [Parameter(n, Parameter.KEYWORD_ONLY, default=value) for n, value in options.items()]
    given = signature(RuleStrategy).parameters.values()
    others = [p for p in given if p.kind is Parameter.KEYWORD_ONLY and p.name != "algorithm"]
    return Signature([*_fedavg(), *theirs, *rules, *others])


_MOMENTS = {"eta": "lr", "eta_l": "", "beta_1": "beta1", "beta_2": "beta2", "tau": "tau"}


class Named(RuleStrategy):
    """A strategy of an algorithm by name; its signature lists all that it takes.

    Attributes:
        flowers: Flower's own arguments of its strategy of this name, with ours for each; "" for
            one that has no effect, in Flower neither.
        in_order: whether Flower takes them by place as well.
    """

    make: ClassVar[Any]  # a function of `fedexp.algorithms`
    flowers: ClassVar[Mapping[str, str]] = {}
    in_order: ClassVar[bool] = False
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        options = _options(cls.make())
        cls.__signature__ = _signature(options, cls.flowers, cls.in_order)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        first = len(_fedavg())
        if self.in_order:
            further = dict(zip(self.flowers, args[first:], strict=False))
            args = (*args[:first], *args[first + len(further) :])
            twice = next(iter(further.keys() & kwargs.keys()), None)
            require(twice is None, f"{twice} is given twice: by place and by name")
            kwargs |= further
        algorithm, options = self.make(), self._translated(kwargs)
        for name in _options(algorithm).keys() & kwargs.keys():
            options[name] = kwargs.pop(name)
        allowed = self.__signature__.parameters
        for name in kwargs:
            if name not in allowed:
                raise unknown_name(f"option of {type(self).__name__}", name, allowed)
        if len(args) > first:
            raise UsageError(f"{type(self).__name__} takes its further options by name, e.g. eps=1")
        super().__init__(*args, algorithm=_with_options(algorithm, options), **kwargs)

    def _translated(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take Flower's arguments out of the given ones, and return them by our names."""
        options: dict[str, Any] = {}
        for theirs, ours in self.flowers.items():
            value = None if theirs == ours else kwargs.pop(theirs, None)
            if value is None:
                continue
            require(ours not in kwargs, f"{theirs} and {ours} are one option; give one of them")
            if ours:
                options[ours] = value
            else:
                log(INFO, "%s has no effect, as in Flower: clients choose it themselves", theirs)
        return options


class FedAvg(Named):
    """FedAvg with a server step size lr (McMahan et al., 2017)."""

    make = staticmethod(algorithms.fedavg)


class FedExP(Named):
    """FedExP (Algorithm 1): the server steps further when clients disagree."""

    make = staticmethod(algorithms.fedexp)


class FedAvgM(Named):
    """FedAvg with server momentum beta (Hsu et al., 2019)."""

    make = staticmethod(algorithms.fedavgm)
    flowers: ClassVar = {"server_learning_rate": "lr", "server_momentum": "beta"}
    in_order = True


class FedExPM(Named):
    """FedExP with server momentum beta (App. F)."""

    make = staticmethod(algorithms.fedexp_m)


class FedProx(Named):
    """FedProx (Li et al., 2020) with strength mu; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox)
    flowers: ClassVar = {"proximal_mu": "mu"}
    in_order = True


class FedProxExP(Named):
    """FedProx with extrapolation; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox_exp)


class Scaffold(Named):
    """SCAFFOLD (Karimireddy et al., 2020); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold)


class ScaffoldExP(Named):
    """SCAFFOLD with extrapolation (Algorithm 2); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold_exp)


class FedAdagrad(Named):
    """FedAdagrad (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadagrad)
    flowers: ClassVar = {"eta": "lr", "eta_l": "", "tau": "tau"}


class FedAdam(Named):
    """FedAdam (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadam)
    flowers = _MOMENTS


class FedYogi(Named):
    """FedYogi (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedyogi)
    flowers = _MOMENTS


STRATEGIES: dict[str, type[Named]] = {
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
