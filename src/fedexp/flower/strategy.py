"""`RuleStrategy`: any rule of this package as a Flower strategy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log
from torch import nn

from fedexp.algorithms import Algorithm
from fedexp.errors import UsageError, require
from fedexp.flower.gather import Gathered, gather
from fedexp.flower.layout import named_parts, same_arrays
from fedexp.flower.nodes import Shares
from fedexp.flower.replies import MetricsFn, Reader, Weighting, mean_of_evaluations
from fedexp.flower.secure_payload import SecureAggregation
from fedexp.flower.server_loop import EvaluateFn, conduct
from fedexp.flower.settings import Settings, check_covered, check_shares, default_weighting
from fedexp.flower.training import Training
from fedexp.privacy import Privacy

CHANGED = (
    "something changed the model between two rounds, which a strategy that wraps this one cannot "
    "do; use privacy= instead of Flower's wrappers"
)


class RuleStrategy(FedAvg):
    """A Flower strategy with the rules of an `Algorithm`.

    FedAvg's arguments come first and mean what they mean there; the others are those of
    `fedexp.flower.settings.Settings`, and `model`, a module of the kind that is trained, which
    says which arrays are buffers and which parameters are tied. Replies are summed as they arrive;
    one that is damaged is left out, and a line says which node and why. Clients train from the
    last iterate; evaluation and `result.arrays` are of the output model, the mean of the last two
    where the rule extrapolates.
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
        identify: bool | None = None,
        privacy: Privacy | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        check_shares(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
        )
        check_covered(privacy, secure, fraction_evaluate)
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
            identify=identify,
        )
        self.training: Training | None = None
        self.last_output: ArrayRecord | None = None

    def summary(self) -> None:
        """Log what the strategy does."""
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

        With `checkpoint` every round is kept, and a second start with the same folder goes on
        after the last complete one, or returns at once what a finished run came to.

        Args:
            grid: of the ServerApp.
            initial_arrays: the first model.
            num_rounds: rounds in all, counted from the very first.
            timeout: seconds that a round waits for its clients, and again for its evaluation.
            train_config: sent to clients that train, with `server-round`.
            evaluate_config: sent to clients that evaluate.
            evaluate_fn: evaluates the output model on the server, also before the first round.
        """
        require(num_rounds >= 1, f"num_rounds must be at least 1, not {num_rounds}")
        require(timeout > 0, f"timeout must be positive, not {timeout}")
        self.training = Training(self.settings, initial_arrays, num_rounds, timeout)
        configs = ConfigRecord(dict(train_config or {})), ConfigRecord(dict(evaluate_config or {}))
        return conduct(self, self.training, grid, configs, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round; clients train from the last iterate, not from the output."""
        if self.fraction_train == 0.0:
            return []
        if self.training is None:
            self.training = Training(self.settings, arrays)
        elif self.last_output is not None:
            same = arrays is self.last_output or same_arrays(arrays, self.last_output)
            require(same, CHANGED)
        config["server-round"] = server_round
        shares = Shares(self.fraction_train, self.min_train_nodes, self.min_available_nodes)
        told = (self.configrecord_key, dict(config))
        return self.training.messages(server_round, grid, shares, self.arrayrecord_key, told)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the replies one by one and take the server's step; return the output model."""
        training = self.training
        if training is None:
            raise UsageError("there is no model yet; call start, or configure_train first")
        reader = Reader(
            training.server,
            self.arrayrecord_key,
            self.weighted_by_key,
            self.settings.weighting,
            self.settings.max_norm,
            training.open_parts,
        )
        told: list[RecordDict] = []
        custom = _custom(self.train_metrics_aggr_fn)
        gathered = gather(replies, reader, told.append if custom else None, training.clipped())
        metrics = gathered.client_metrics
        if custom and told:
            metrics = dict(custom(told, self.weighted_by_key))
        return self.complete_train(gathered, metrics)

    def complete_train(
        self, gathered: Gathered, client_metrics: dict[str, Any]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """The server's step, whatever way the sums came; no arrays where nothing moved."""
        assert self.training is not None
        hidden = self.training.hides_client_metrics
        numbers = self.training.complete(gathered)
        metrics = MetricRecord({**({} if hidden else client_metrics), **numbers})
        if not self.training.stepped:
            return None, metrics
        self.last_output = self.training.server.output()
        return self.last_output, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of an evaluation, to as many nodes as are there; it waits for none."""
        nodes = list(grid.get_node_ids())
        if self.fraction_evaluate == 0.0 or not nodes:
            return []
        if self.training is None:
            self.training = Training(self.settings, arrays)
        wanted = max(int(len(nodes) * self.fraction_evaluate), self.min_evaluate_nodes)
        cohort = self.training.evaluators(server_round, self.settings.seed, nodes, wanted)
        log(INFO, "configure_evaluate: Sampled %s nodes (out of %s)", len(cohort), len(nodes))
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        kind, ttl = MessageType.EVALUATE, self.training.lifetime
        return [Message(record, node, kind, ttl=ttl) for node in cohort]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The means of what clients measured; replies that cannot be used are left out."""
        aggregate = _custom(self.evaluate_metrics_aggr_fn)
        if self.training is not None:
            replies = self.training.evaluation_absences.watch(server_round, replies)
        return mean_of_evaluations(replies, self.weighted_by_key, aggregate)


def _custom(function: MetricsFn) -> MetricsFn | None:
    """The function where it is the user's own; Flower's needs all replies, ours does not."""
    return None if function is aggregate_metricrecords else function
