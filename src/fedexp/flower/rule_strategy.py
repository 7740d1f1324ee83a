"""`RuleStrategy`: a Flower strategy with the rules of any `Algorithm`.

It takes FedAvg's ten arguments first and in order, then, by name, those of
`fedexp.flower.settings.Settings`. The algorithms of this package have strategies of their own
(`fedexp.flower.strategies`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from logging import INFO, WARNING
from numbers import Real
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log
from torch import nn

from fedexp.algorithms import Algorithm
from fedexp.errors import UsageError, require, whole_number
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
NO_REPLIES = (
    "with secure= the server sees sums and no replies, so aggregate_train is never called; leave "
    "aggregate_train as it is, and save or check the model of each round in evaluate_fn"
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
        require(
            secure is None or type(self).aggregate_train is RuleStrategy.aggregate_train, NO_REPLIES
        )
        if model is not None:
            require(
                isinstance(model, nn.Module), f"model must be a module, model=Net(), not {model!r}"
            )
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
        self.known_arrays: ArrayRecord | None = None  # those that configure_train expects

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
        num_rounds = whole_number("num_rounds", num_rounds, least=1)
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
        configs = ConfigRecord(dict(train_config or {})), ConfigRecord(dict(evaluate_config or {}))
        return run_rounds(self, self.run, grid, configs, evaluate_fn)

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
        elif self.known_arrays is not None:
            same = arrays is self.known_arrays or same_arrays(arrays, self.known_arrays)
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
            run.client_noise,
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
        theirs = {} if self.run.hides_client_metrics else client_metrics
        numbers = self.run.complete_round(replies)
        if taken := ", ".join(sorted(theirs.keys() & numbers.keys())):
            text = "clients' metrics named %s are left out, because the server reports its own by "
            self.run.log_once(WARNING, text + "this name; rename them in the ClientApp", taken)
        metrics = MetricRecord({**theirs, **numbers})
        if not self.run.stepped:
            return None, metrics
        self.known_arrays = self.run.server.output()  # a loop of Flower's passes them on
        return self.known_arrays, metrics

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
