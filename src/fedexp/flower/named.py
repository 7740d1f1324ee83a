"""The algorithms by name, as strategies: `from fedexp.flower import FedExP` is all that changes.

Each takes FedAvg's ten arguments first and in order, then, by name, the options of its rules (eps,
beta, mu, ...) and those of `RuleStrategy`.

>>> FedExP(0.5, 1.0, 10, eps=0.01, seed=1).settings.algorithm
Algorithm(name='fedexp', client=SGD(), server=ExP(eps=0.01, ...), average_last=None)
"""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

from fedexp import algorithms
from fedexp.algorithms import Algorithm
from fedexp.errors import UsageError, unknown_name
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


def _signature(options: dict[str, Any]) -> Signature:
    """FedAvg's arguments, the options of the rules, then those of every strategy."""
    rules = [Parameter(n, Parameter.KEYWORD_ONLY, default=value) for n, value in options.items()]
    given = signature(RuleStrategy).parameters.values()
    others = [p for p in given if p.kind is Parameter.KEYWORD_ONLY and p.name != "algorithm"]
    return Signature([*_fedavg(), *rules, *others])


class Named(RuleStrategy):
    """A strategy of an algorithm by name; its signature lists all that it takes."""

    make: ClassVar[Any]  # a function of `fedexp.algorithms`
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        options = _options(cls.make())
        cls.__signature__ = _signature(options)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        algorithm, options = self.make(), {}
        for name in _options(algorithm).keys() & kwargs.keys():
            options[name] = kwargs.pop(name)
        allowed = self.__signature__.parameters
        for name in kwargs:
            if name not in allowed:
                raise unknown_name(f"option of {type(self).__name__}", name, allowed)
        if len(args) > len(_fedavg()):
            raise UsageError(f"{type(self).__name__} takes its further options by name, e.g. eps=1")
        super().__init__(*args, algorithm=_with_options(algorithm, options), **kwargs)


class FedAvg(Named):
    """FedAvg with a server step size lr (McMahan et al., 2017)."""

    make = staticmethod(algorithms.fedavg)


class FedExP(Named):
    """FedExP (Algorithm 1): the server steps further when clients disagree."""

    make = staticmethod(algorithms.fedexp)


class FedAvgM(Named):
    """FedAvg with server momentum beta (Hsu et al., 2019)."""

    make = staticmethod(algorithms.fedavgm)


class FedExPM(Named):
    """FedExP with server momentum beta (App. F)."""

    make = staticmethod(algorithms.fedexp_m)


class FedProx(Named):
    """FedProx (Li et al., 2020) with strength mu; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox)


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


class FedAdam(Named):
    """FedAdam (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadam)


class FedYogi(Named):
    """FedYogi (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedyogi)


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
