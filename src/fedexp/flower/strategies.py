"""The algorithms of this package as Flower strategies: `from fedexp.flower import FedExP`.

`RuleStrategy` runs any `Algorithm`; one subclass per algorithm has its options as arguments. Each
takes FedAvg's ten arguments first and in order, then, by name, the options of its rules (eps, beta,
mu, ...) and those of `RuleStrategy`. Those that Flower has too also take Flower's arguments, by
Flower's names and positions.

>>> FedExP(0.5, 1.0, 10, eps=0.01, seed=1).settings.algorithm
Algorithm(name='fedexp', client=SGD(), server=ExP(eps=0.01, ...), average_last=None)
>>> FedAdam(eta=0.1, beta_1=0.8).settings.algorithm.server
Adam(lr=0.1, ...beta1=0.8, beta2=0.99)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from logging import INFO
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log
from torch import nn

from fedexp import algorithms
from fedexp.algorithms import Algorithm
from fedexp.errors import UsageError, renamed_arguments, require, unknown_name
from fedexp.flower.layout import named_parts, same_arrays
from fedexp.flower.metrics import MetricsFn, aggregate_evaluations
from fedexp.flower.nodes import CohortSize
from fedexp.flower.replies import AggregatedReplies, ReplyReader, Weighting, aggregate_replies
from fedexp.flower.run import FederatedRun
from fedexp.flower.secure_payload import SecureAggregation
from fedexp.flower.server_loop import EvaluateFn, run_rounds
from fedexp.flower.settings import Settings, check_evaluation, check_fractions, default_weighting
from fedexp.privacy import Privacy

CHANGED = (
    "something changed the model between two rounds, which a strategy that wraps this one cannot "
    "do; use privacy= instead of Flower's wrappers"
)


class RuleStrategy(FlowerFedAvg):
    """A Flower strategy with the rules of an `Algorithm`.

    FedAvg's arguments come first and have the same meaning; the others are those of
    `fedexp.flower.settings.Settings`, and `model`, a module of the architecture that is trained,
    which decides which arrays are buffers and which parameters are tied. Replies are summed as they
    arrive; a damaged one is left out, and the log names its node and the reason. Clients train from
    the last iterate; evaluation and `result.arrays` are of the output model, the mean of the last
    two where the rule extrapolates.
    """

    @renamed_arguments(identify="query_client_ids")
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
        algorithm: Algorithm,
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
        check_fractions(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
        )
        check_evaluation(privacy, secure, fraction_evaluate)
        super().__init__(
            fraction_train,
            fraction_evaluate,
            min_train_nodes,
            min_evaluate_nodes,
            min_available_nodes,
            weighted_by_key,
            arrayrecord_key,
            configrecord_key,
            train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn,
        )
        if model is not None:
            found = named_parts(model)
            buffers = found[0] if buffers is None else buffers
            tied = found[1] if tied is None else tied
        self.settings = Settings(
            algorithm,
            weighting=default_weighting(privacy, secure) if weighting is None else weighting,
            seed=seed,
            buffers=buffers,
            checkpoint=checkpoint,
            name=name,
            total_clients=total_clients,
            wait_for_nodes=wait_for_nodes,
            max_empty_rounds=max_empty_rounds,
            privacy=privacy,
            secure=secure,
            tied=tied,
            max_norm=max_norm,
            min_replies=min_replies,
            query_client_ids=query_client_ids,
        )
        self.run: FederatedRun | None = None
        self.last_output: ArrayRecord | None = None

    def summary(self) -> None:
        """Log the algorithm, the weights and the seed, then FedAvg's own summary."""
        given = self.settings
        log(INFO, "\t├──> %s, %s weights, seed %d", given.algorithm, given.weighting, given.seed)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train; the arguments and the result are those of Flower's own strategies.

        With `checkpoint` every round is stored, and a second start with the same folder resumes
        after the last complete one, or returns the stored result of a finished run at once.

        Args:
            grid: of the ServerApp.
            initial_arrays: the initial model.
            num_rounds: rounds in total, counted from the very first.
            timeout: seconds that a round waits for its clients, and again for its evaluation.
            train_config: sent to clients that train, with `server-round`.
            evaluate_config: sent to clients that evaluate.
            evaluate_fn: evaluates the output model on the server, also before the first round.
        """
        require(num_rounds >= 1, f"num_rounds must be at least 1, not {num_rounds}")
        require(timeout > 0, f"timeout must be positive, not {timeout}")
        self.run = FederatedRun(self.settings, initial_arrays, num_rounds, timeout)
        configs = ConfigRecord(dict(train_config or {})), ConfigRecord(dict(evaluate_config or {}))
        return run_rounds(self, self.run, grid, configs, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the train messages of a round; they carry the last iterate, not the output."""
        if self.fraction_train == 0.0:
            return []
        if self.run is None:
            self.run = FederatedRun(self.settings, arrays)
        elif self.last_output is not None:
            same = arrays is self.last_output or same_arrays(arrays, self.last_output)
            require(same, CHANGED)
        config["server-round"] = server_round
        size = CohortSize(self.fraction_train, self.min_train_nodes, self.min_available_nodes)
        return self.run.configure_round(
            server_round, grid, size, self.arrayrecord_key, (self.configrecord_key, dict(config))
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the replies one by one and take the server step; return the output model."""
        run = self.run
        if run is None:
            raise UsageError("there is no model yet; call start, or configure_train first")
        reader = ReplyReader(
            run.server,
            self.arrayrecord_key,
            self.weighted_by_key,
            self.settings.weighting,
            self.settings.max_norm,
            run.undecided_layout,
        )
        records: list[RecordDict] = []
        custom = _custom(self.train_metrics_aggr_fn)
        found = aggregate_replies(replies, reader, records.append if custom else None, run.clip)
        metrics = found.client_metrics
        if custom and records:
            metrics = dict(custom(records, self.weighted_by_key))
        return self.complete_train(found, metrics)

    def complete_train(
        self, replies: AggregatedReplies, client_metrics: dict[str, Any]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Take the server step with the sums of a round; return no arrays if there was none."""
        assert self.run is not None
        hidden = self.run.hides_client_metrics
        numbers = self.run.complete_round(replies)
        metrics = MetricRecord({**({} if hidden else client_metrics), **numbers})
        if not self.run.stepped:
            return None, metrics
        self.last_output = self.run.server.output()
        return self.last_output, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of an evaluation to the available nodes; it waits for none."""
        nodes = list(grid.get_node_ids())
        if self.fraction_evaluate == 0.0 or not nodes:
            return []
        if self.run is None:
            self.run = FederatedRun(self.settings, arrays)
        wanted = max(int(len(nodes) * self.fraction_evaluate), self.min_evaluate_nodes)
        cohort = self.run.evaluation_nodes(server_round, self.settings.seed, nodes, wanted)
        log(INFO, "configure_evaluate: Sampled %s nodes (out of %s)", len(cohort), len(nodes))
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        kind, ttl = MessageType.EVALUATE, self.run.message_ttl
        return [Message(record, node, kind, ttl=ttl) for node in cohort]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of the clients' metrics; replies that cannot be used are left out."""
        aggregate = _custom(self.evaluate_metrics_aggr_fn)
        if self.run is not None:
            replies = self.run.evaluate_backoff.watch(server_round, replies)
        return aggregate_evaluations(replies, self.weighted_by_key, aggregate)


def _custom(function: MetricsFn) -> MetricsFn | None:
    """Return the user's own function, None for Flower's default, which needs all replies."""
    return None if function is aggregate_metricrecords else function


class NamedStrategy(RuleStrategy):
    """Base of the strategies with an algorithm of their own; the signature lists all arguments.

    Attributes:
        make: the function of `fedexp.algorithms` that returns the algorithm.
        flower_arguments: maps the arguments of Flower's strategy of this name to ours; "" for one
            that has no effect, as in Flower.
        positional: whether Flower takes them by position too.
    """

    make: ClassVar[Any]
    flower_arguments: ClassVar[Mapping[str, str]] = {}
    positional: ClassVar[bool] = False
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        options = _options(cls.make())
        cls.__signature__ = _signature(options, cls.flower_arguments, cls.positional)

    @renamed_arguments(identify="query_client_ids")
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        first = len(_fedavg_parameters())
        if self.positional:
            further = dict(zip(self.flower_arguments, args[first:], strict=False))
            args = (*args[:first], *args[first + len(further) :])
            twice = next(iter(further.keys() & kwargs.keys()), None)
            require(twice is None, f"{twice} is given twice: by position and by name")
            kwargs |= further
        algorithm, options = self.make(), self._take_flower_arguments(kwargs)
        for name in _options(algorithm).keys() & kwargs.keys():
            options[name] = kwargs.pop(name)
        allowed = self.__signature__.parameters
        for name in kwargs:
            if name not in allowed:
                raise unknown_name(f"option of {type(self).__name__}", name, allowed)
        if len(args) > first:
            raise UsageError(f"{type(self).__name__} takes its further options by name, e.g. eps=1")
        super().__init__(*args, algorithm=_with_options(algorithm, options), **kwargs)

    def _take_flower_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove Flower's arguments from `kwargs`; return them by our names."""
        options: dict[str, Any] = {}
        for theirs, ours in self.flower_arguments.items():
            value = None if theirs == ours else kwargs.pop(theirs, None)
            if value is None:
                continue
            require(ours not in kwargs, f"{theirs} and {ours} are one option; give one of them")
            if ours:
                options[ours] = value
            else:
                log(INFO, "%s has no effect, as in Flower: clients choose it themselves", theirs)
        return options


def _options(algorithm: Algorithm) -> dict[str, Any]:
    """Return the options of an algorithm with their values: those of its two rules, and its own."""
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


def _fedavg_parameters() -> list[Parameter]:
    given = signature(RuleStrategy).parameters.values()
    return [each for each in given if each.kind is Parameter.POSITIONAL_OR_KEYWORD]


def _signature(
    options: dict[str, Any], flower_arguments: Mapping[str, str], positional: bool
) -> Signature:
    """Return the signature: FedAvg's arguments, those of Flower's strategy of the same name, the
    options of the rules, then the arguments of every strategy of this package."""
    kind = Parameter.POSITIONAL_OR_KEYWORD if positional else Parameter.KEYWORD_ONLY
    theirs = [Parameter(n, kind, default=None) for n in flower_arguments if n not in options]
    rules = [Parameter(n, Parameter.KEYWORD_ONLY, default=value) for n, value in options.items()]
    given = signature(RuleStrategy).parameters.values()
    common = [p for p in given if p.kind is Parameter.KEYWORD_ONLY and p.name != "algorithm"]
    return Signature([*_fedavg_parameters(), *theirs, *rules, *common])


_MOMENTS = {"eta": "lr", "eta_l": "", "beta_1": "beta1", "beta_2": "beta2", "tau": "tau"}


class FedAvg(NamedStrategy):
    """FedAvg with a server step size lr (McMahan et al., 2017)."""

    make = staticmethod(algorithms.fedavg)


class FedExP(NamedStrategy):
    """FedExP (Algorithm 1): the server steps further when clients disagree."""

    make = staticmethod(algorithms.fedexp)


class FedAvgM(NamedStrategy):
    """FedAvg with server momentum beta (Hsu et al., 2019)."""

    make = staticmethod(algorithms.fedavgm)
    flower_arguments: ClassVar = {"server_learning_rate": "lr", "server_momentum": "beta"}
    positional = True


class FedExPM(NamedStrategy):
    """FedExP with server momentum beta (App. F)."""

    make = staticmethod(algorithms.fedexp_m)


class FedProx(NamedStrategy):
    """FedProx (Li et al., 2020) with strength mu; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox)
    flower_arguments: ClassVar = {"proximal_mu": "mu"}
    positional = True


class FedProxExP(NamedStrategy):
    """FedProx with extrapolation; clients need `LocalRule`."""

    make = staticmethod(algorithms.fedprox_exp)


class Scaffold(NamedStrategy):
    """SCAFFOLD (Karimireddy et al., 2020); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold)


class ScaffoldExP(NamedStrategy):
    """SCAFFOLD with extrapolation (Algorithm 2); clients need `LocalRule`."""

    make = staticmethod(algorithms.scaffold_exp)


class FedAdagrad(NamedStrategy):
    """FedAdagrad (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadagrad)
    flower_arguments: ClassVar = {"eta": "lr", "eta_l": "", "tau": "tau"}


class FedAdam(NamedStrategy):
    """FedAdam (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedadam)
    flower_arguments = _MOMENTS


class FedYogi(NamedStrategy):
    """FedYogi (Reddi et al., 2021)."""

    make = staticmethod(algorithms.fedyogi)
    flower_arguments = _MOMENTS


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
