"""`RuleStrategy`: a Flower strategy with the rules of any `Algorithm`, and its `Settings`.

It takes the ten arguments of Flower's FedAvg first and in order, then, by name, those of
`Settings`. `fedexp.flower.strategies` has one strategy per algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from logging import INFO, WARNING
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypedDict, Unpack, cast, get_args

import torch
from flwr.app import (
    DEFAULT_TTL,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log
from torch import nn

from fedexp.algorithms import Algorithm
from fedexp.client import Prox
from fedexp.errors import (
    UsageError,
    is_number,
    require,
    unknown_name,
    whole_number,
)
from fedexp.flower.layout import named_parts, same_arrays
from fedexp.flower.metrics import MetricsFn, aggregate_evaluations
from fedexp.flower.nodes import CohortSize
from fedexp.flower.replies import AggregatedReplies, ReplyReader, Weighting, aggregate_replies
from fedexp.flower.request import CLIENT_RULES, rule_config
from fedexp.flower.secure.payload import NOT_UNIFORM, SecureAggregation
from fedexp.flower.server import FederatedRun
from fedexp.flower.server_loop import EvaluateFn, ServerLoop
from fedexp.privacy import Privacy
from fedexp.privacy.settings import check_fit, warn_seeded

P = ParamSpec("P")
CHANGED = (
    "something changed the model between two rounds, which a strategy that wraps this one cannot "
    "do; use privacy= instead of Flower's wrappers"
)
SECURE_STEP = 2.0  # a client can lie about its squared norm, which only the sum shows
NO_REPLIES = (
    "with secure= the server sees sums and no replies, so aggregate_train is never called; leave "
    "aggregate_train as it is, and save or check the model of each round in evaluate_fn"
)


class StrategyOptions(TypedDict, total=False):
    """The arguments that every strategy takes, for type checkers: FedAvg's and `Settings`."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsFn | None
    evaluate_metrics_aggr_fn: MetricsFn | None
    weighting: Weighting | None
    seed: int
    model: nn.Module | None
    buffers: Collection[str] | None
    tied: Mapping[str, str] | None
    checkpoint: str | Path | None
    name: str
    total_clients: int | None
    wait_for_nodes: float | None
    max_empty_rounds: int
    max_norm: float | None
    bound: float | None
    min_replies: int
    quorum: int | None
    evaluate_every: int
    query_client_ids: bool | None
    privacy: Privacy | None
    secure: SecureAggregation | None


@dataclass(frozen=True)
class Settings:
    """How a strategy trains.

    Args:
        algorithm: a client rule and a server rule.
        weighting: "uniform" as in the paper, or "num-examples" as in Flower's FedAvg; the same
            weights enter the mean and the mean squared norm. When None, "num-examples", and
            "uniform" where a client's share must be bounded or hidden.
        seed: decides the cohorts.
        model: a module of the architecture that is trained, which decides `buffers` and `tied`
            where these are None.
        buffers: names of the arrays that are averaged and never extrapolated; when None, what
            clients with `LocalRule` report, else the statistics of BatchNorm.
        tied: maps each further name of a parameter to its first name; when None, what clients
            report, else arrays that are equal before and after training.
        checkpoint: folder in which the run is stored, and from which it resumes; None for none.
        name: of the task in the run folder and in reports.
        total_clients: number of clients, for SCAFFOLD; when None, and at least, the most seen.
        wait_for_nodes: seconds to wait for enough nodes; the timeout of `start` when None.
        max_empty_rounds: rounds in a row without a usable reply after which the run ends, or falls
            back to an earlier state where clients could not train.
        max_norm: replies whose update has a larger norm are left out; None for no bound.
        bound: what a client adds to the sums is clipped to this many times the median over clients
            (docs/untrusted-clients.md); that of the algorithm when None.
        min_replies: usable replies that a round needs; with fewer the model is unchanged, and the
            round counts as empty.
        quorum: models or metrics in reply after which a round, or its evaluation, ends; later ones
            are ignored. None waits for all until the timeout.
        evaluate_every: rounds between evaluations, by clients and by `evaluate_fn`; the last round
            always is evaluated.
        query_client_ids: whether to query nodes for their client id; when None, only for rules
            with client state and with privacy, because a ClientApp without
            `report_client_id(app)` logs the query as an error.
        privacy: `CentralPrivacy` or `LocalPrivacy` of `fedexp.privacy`.
        secure: `SecureAggregation`, so that the server sees sums of updates only; steps are of 2 at
            most unless the algorithm has a `max_step`.
    """

    algorithm: Algorithm
    weighting: Weighting | None = None
    seed: int = 0
    model: nn.Module | None = None
    buffers: Collection[str] | None = None
    tied: Mapping[str, str] | None = None
    checkpoint: str | Path | None = None
    name: str = "flower"
    total_clients: int | None = None
    wait_for_nodes: float | None = None
    max_empty_rounds: int = 3
    max_norm: float | None = None
    bound: float | None = None
    min_replies: int = 1
    quorum: int | None = None
    evaluate_every: int = 1
    query_client_ids: bool | None = None
    privacy: Privacy | None = None
    secure: SecureAggregation | None = None

    def __post_init__(self) -> None:
        if (model := self.model) is not None:
            require(
                isinstance(model, nn.Module), f"model must be a module, model=Net(), not {model!r}"
            )
            buffers, tied = named_parts(model)
            object.__setattr__(self, "buffers", buffers if self.buffers is None else self.buffers)
            object.__setattr__(self, "tied", tied if self.tied is None else self.tied)
        if self.secure is not None:
            server = self.algorithm.server.with_step_bound(SECURE_STEP)
            object.__setattr__(self, "algorithm", replace(self.algorithm, server=server))
        if self.bound is not None:
            object.__setattr__(self, "algorithm", replace(self.algorithm, bound=self.bound))
        require(
            self.algorithm.server_schedule == "constant",
            "server_schedule needs the simulator; leave it out on Flower",
        )
        rule = self.algorithm.client
        require(
            type(rule) in CLIENT_RULES.values(),
            f"on Flower the client rule is SGD, Prox or Scaffold, not {type(rule).__name__}; use "
            "one of these, or simulate",
        )
        require(
            self.weights in get_args(Weighting),
            f"weighting is uniform or num-examples, not {self.weighting!r}",
        )
        least_values = {"seed": 0, "max_empty_rounds": 1, "total_clients": 1, "min_replies": 1}
        least_values |= {"quorum": self.min_replies, "evaluate_every": 1}
        for name, least in least_values.items():
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, least)
        require(
            self.secure is None or isinstance(self.secure, SecureAggregation),
            f"secure must be SecureAggregation(clip=...), not {self.secure!r}",
        )
        require(self.secure is None or self.weights == "uniform", NOT_UNIFORM)
        require(
            self.checkpoint is None or isinstance(self.checkpoint, str | PathLike),
            f"checkpoint must be a folder, checkpoint='runs/first', not {self.checkpoint!r}",
        )
        wait = self.wait_for_nodes
        require(
            wait is None or (isinstance(wait, Real) and wait >= 0),
            f"wait_for_nodes must be a number of seconds, not {wait!r}",
        )
        if self.privacy is not None:
            require(
                isinstance(self.privacy, Privacy),
                f"privacy must be CentralPrivacy(...) or LocalPrivacy(...), not {self.privacy!r}",
            )
            check_fit(self.privacy, self.algorithm, self.weights, buffers=False)
            warn_seeded(self.privacy)
        if self.secure is not None and self.privacy is not None:
            raise UsageError("secure and privacy cannot be combined yet; leave one of them out")
        most = self.max_norm
        require(
            most is None or (is_number(most) and most > 0),
            f"max_norm must be positive and finite, not {most!r}",
        )
        require(
            most is None or self.secure is None,
            "max_norm needs updates that the server can see; leave it out: the clip of "
            "SecureAggregation bounds them, and bound lets it follow them",
        )
        is_central = self.privacy is not None and not self.noised_by_clients
        require(
            self.min_replies == 1 or not is_central,
            "min_replies would let the data decide whether noise is released; leave it out with "
            "central privacy",
        )
        require(
            self.quorum is None or not (is_central or self.secure),
            "quorum lets one reply decide which others count, and a secure sum waits for its "
            "shares; leave it out with central privacy and with secure",
        )

    @property
    def weights(self) -> Weighting:
        """Return the weighting, or the one that is used where it is None."""
        if self.weighting is not None:
            return self.weighting
        return "num-examples" if self.privacy is None and self.secure is None else "uniform"

    @property
    def stateful_clients(self) -> bool:
        """Return whether the rule has client state (SCAFFOLD's control variates)."""
        return bool(self.algorithm.client.init_client_state(torch.zeros(0)))

    @property
    def noised_by_clients(self) -> bool:
        """Return whether clients add noise to their updates (local privacy)."""
        return self.privacy is not None and self.privacy.noised_by_clients

    @property
    def fixes_layout(self) -> bool:
        """Return whether noise or masks depend on the layout, so that it cannot change later."""
        return self.privacy is not None or self.secure is not None

    @property
    def queries_client_ids(self) -> bool:
        """Return whether nodes are queried for their client ids."""
        if self.query_client_ids is not None:
            return self.query_client_ids
        return self.stateful_clients or self.privacy is not None

    def client_config(self) -> dict[str, Any]:
        """Return the config of the client rule, as train messages carry it."""
        rule = self.algorithm.client
        config = rule_config(rule)
        if isinstance(rule, Prox):
            config["proximal-mu"] = rule.mu  # by Flower's name, for a ClientApp without LocalRule
        if self.buffers is not None:
            config["fedexp.buffers"] = sorted(self.buffers)
        return config


def check_fractions(arguments: Mapping[str, Any]) -> None:
    """Refuse fractions outside [0, 1] and negative numbers of nodes among FedAvg's arguments."""
    for name, value in arguments.items():
        if name.startswith(("fraction_", "min_")):
            require(is_number(value), f"{name} must be a number, not {value!r}")
            require(value >= 0, f"{name} must not be negative, but is {value}")
        if name.startswith("fraction_"):
            require(value <= 1, f"{name} must be in [0, 1], not {value}")


def check_evaluation(settings: Settings, fraction_evaluate: float) -> None:
    """Refuse evaluation by clients in a private run; warn of it in a secure one.

    The metrics of an evaluation are exact, and the server sees those of each client.
    """
    require(
        settings.privacy is None or fraction_evaluate == 0,
        "privacy does not cover the metrics of an evaluation by clients; set "
        "fraction_evaluate=0.0, and evaluate on the server by evaluate_fn",
    )
    if settings.secure is not None and fraction_evaluate > 0:
        log(
            WARNING,
            "secure aggregation does not cover evaluation: each client's metrics reach the server "
            "in the clear, its number of examples too; set fraction_evaluate=0.0",
        )


FEDAVG = signature(FlowerFedAvg).parameters
OPTIONS = [
    Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
    for option in fields(Settings)
    if option.name != "algorithm"
]


def strategy_arguments(*by_position: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Write `*fedavg` and `**options` out in the signature of a constructor, and check its calls.

    The constructor is called with all arguments by name, those of `flower_arguments` also by the
    names of this package. An argument that is unknown or given twice is refused in a line with the
    remedy.

    Args:
        by_position: the first arguments of the constructor that, as in Flower, may follow FedAvg's
            by position.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        itself, _, *arguments, _ = signature(init).parameters.values()
        arguments = [
            p.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) if p.name in by_position else p
            for p in arguments
        ]
        written_out = Signature([itself, *FEDAVG.values(), *arguments, *OPTIONS])

        @wraps(init)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            cast(Any, init)(**_bound(written_out, args, kwargs))

        call.__signature__ = written_out  # type: ignore[attr-defined]
        return call

    return decorate


def _bound(written_out: Signature, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, Flower's names replaced and defaults included."""
    strategy, names = args[0], [*written_out.parameters][1:]
    kind, calls_as_flower = type(strategy).__name__, False
    for option in kwargs:
        if option not in names:
            raise unknown_name(f"option of {kind}", option, names)
    try:
        bound = written_out.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{kind}: {error}; give FedAvg's arguments first, and the others once, by name"
        ) from None
    for alias, option in strategy.flower_arguments.items():
        if (value := bound.arguments.get(alias)) is None:
            continue
        calls_as_flower |= alias != option
        if not option:
            log(INFO, "%s has no effect, as in Flower: clients choose it themselves", alias)
            continue
        only_one = alias == option or option not in bound.arguments
        require(only_one, f"{alias} and {option} are one option; give one of them")
        bound.arguments[option] = value
    for alias, default in strategy.flower_defaults.items() if calls_as_flower else ():
        if (option := strategy.flower_arguments[alias]) not in bound.arguments:
            text = "%s is %s here, where it is %s in Flower's %s; give the value that you rely on"
            log(WARNING, text, alias, written_out.parameters[option].default, default, kind)
    bound.apply_defaults()
    return bound.arguments


class RuleStrategy(FlowerFedAvg):
    """A Flower strategy with the rules of an `Algorithm`.

    FedAvg's arguments come first and have the same meaning; the others are those of
    `fedexp.flower.strategy.Settings`. Replies are summed as they arrive; a damaged one is left out,
    and the log names its node and the reason. Clients train from the last iterate; evaluation and
    `result.arrays` are of the output model, the mean of the last two where the rule extrapolates.

    Attributes:
        flower_arguments: maps the arguments of Flower's strategy of this name to those of this
            package; "" for one that has no effect, as in Flower.
        flower_defaults: Flower's defaults of those that have another one here.
    """

    flower_arguments: ClassVar[Mapping[str, str]] = {}
    flower_defaults: ClassVar[Mapping[str, float]] = {}

    @strategy_arguments()
    def __init__(
        self, *fedavg: Any, algorithm: Algorithm, **options: Unpack[StrategyOptions]
    ) -> None:
        arguments: dict[str, Any] = {**options}
        of_fedavg = {name: arguments.pop(name) for name in FEDAVG}
        check_fractions(of_fedavg)
        self.settings = Settings(algorithm, **arguments)
        check_evaluation(self.settings, of_fedavg["fraction_evaluate"])
        super().__init__(**of_fedavg)
        require(
            self.settings.secure is None
            or type(self).aggregate_train is RuleStrategy.aggregate_train,
            NO_REPLIES,
        )
        self.run: FederatedRun | None = None

    def summary(self) -> None:
        """Log the algorithm, the weights and the seed, then FedAvg's own summary."""
        used = self.settings
        log(INFO, "\t├──> %s, %s weights, seed %d", used.algorithm, used.weights, used.seed)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train; the arguments and the result are those of Flower's own strategies.

        With `checkpoint` every round is stored, and a second start with the same folder resumes
        after the last complete one, also with what an error has asked to change (docs/flower.md,
        Resuming), or returns the stored result of a finished run at once.

        Args:
            grid: of the ServerApp.
            initial_arrays: the initial model.
            num_rounds: rounds in total, counted from the very first; more extend a stored run, and
                0 evaluates the initial model.
            timeout: seconds that a round waits for its clients, and again for its evaluation; None
                for the 12 hours that Flower keeps messages.
            train_config: sent to clients that train, with `server-round`.
            evaluate_config: sent to clients that evaluate.
            evaluate_fn: evaluates the output model on the server, also before the first round.
        """
        num_rounds = whole_number("num_rounds", num_rounds, least=0)
        timeout = DEFAULT_TTL if timeout is None else timeout
        require(
            isinstance(timeout, Real) and timeout > 0,
            f"timeout must be a positive number of seconds, not {timeout}",
        )
        require(
            isinstance(initial_arrays, Mapping),
            "initial_arrays must be a record, such as ArrayRecord(model.state_dict()), not a "
            f"{type(initial_arrays).__name__}",
        )
        self.run = FederatedRun(self.settings, initial_arrays, num_rounds, timeout)
        train, evaluate = (ConfigRecord(dict(c or {})) for c in (train_config, evaluate_config))
        return ServerLoop(self, self.run, grid, train, evaluate, evaluate_fn).complete()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the train messages of a round; they carry the last iterate.

        `start` passes that iterate as `arrays`, for a `configure_train` of a subclass to send.
        """
        if self.fraction_train == 0.0:
            return []
        if self.run is None:
            self.run = FederatedRun(self.settings, arrays)
        elif (expected := self.run.expected) is not None:
            require(arrays is expected or same_arrays(arrays, expected), CHANGED)
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
        mechanism = run.mechanism
        reader = ReplyReader(
            run,
            self.arrayrecord_key,
            self.weighted_by_key,
            self.settings.weights,
            self.settings.max_norm,
            run.undecided_layout,
            noise={} if mechanism is None else mechanism.config(),
        )
        function = _custom(self.train_metrics_aggr_fn)
        return self.complete_train(aggregate_replies(replies, reader, function, mechanism))

    def complete_train(self, replies: AggregatedReplies) -> tuple[ArrayRecord | None, MetricRecord]:
        """Take the server step with the sums of a round; return no arrays if there was none."""
        assert self.run is not None
        mechanism = self.run.mechanism
        is_hidden = mechanism is not None and mechanism.hides_client_metrics
        client_metrics = {} if is_hidden else replies.client_metrics
        numbers = self.run.complete_round(replies)
        if taken := ", ".join(sorted(client_metrics.keys() & numbers.keys())):
            text = "clients' metrics named %s are left out, because the server reports its own by "
            self.run.log_once(WARNING, text + "this name; rename them in the ClientApp", taken)
        metrics = MetricRecord({**client_metrics, **numbers})
        if not self.run.stepped:
            return None, metrics
        self.run.expected = self.run.output()  # a loop of Flower's passes them on
        return self.run.expected, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of an evaluation to the available nodes; it waits for none."""
        if self.fraction_evaluate == 0.0:
            return []
        if self.run is None:
            self.run = FederatedRun(self.settings, arrays)
        nodes = self.run.available_nodes(grid)
        wanted = max(int(len(nodes) * self.fraction_evaluate), self.min_evaluate_nodes)
        cohort = self.run.evaluation_nodes(server_round, nodes, wanted)
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
