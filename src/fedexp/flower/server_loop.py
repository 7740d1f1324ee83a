"""The loop over rounds: train, evaluate, store, until the run is complete.

Flower's own `Strategy.start` always begins at round 1 and holds all replies of a round. This loop
resumes from a checkpoint, streams replies, and stores every round before the next one starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info
from flwr.supercore import log

from fedexp.errors import DivergedError, require
from fedexp.flower.checkpoint import (
    changed_config,
    check_losses,
    conclude,
    open_run,
    restored_config,
    restored_result,
    round_row,
)
from fedexp.flower.layout import same_arrays
from fedexp.flower.replies import chunk_size
from fedexp.flower.server import FederatedRun
from fedexp.flower.transport import Replies, stream_replies
from fedexp.privacy import BudgetSpentError
from fedexp.storage import finite

if TYPE_CHECKING:
    from fedexp.flower.strategy import RuleStrategy

DISCARDED = (
    "aggregate_train returned no arrays, although the server has taken its step; return those of "
    "super().aggregate_train, or changed ones"
)
NOT_NOISED = (
    "aggregate_train returned another model than super().aggregate_train did, and it may contain "
    "the clients' updates without noise; with central privacy return that one unchanged, or leave "
    "aggregate_train as it is"
)
DIVERGED = (
    "lower the local or server learning rate, clip gradients in the ClientApp, or set bound or "
    "max_norm; the checkpoint resumes with any of these"
)
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(eq=False)
class ServerLoop:
    """The rounds of a run, one after another.

    Args:
        strategy: configures and aggregates each round.
        run: of that strategy.
        grid: of the ServerApp.
        train_config: sent to clients that train.
        evaluate_config: sent to clients that evaluate.
        evaluate_fn: evaluates the output model on the server, also before the first round.

    Attributes:
        result: of the rounds so far, stored ones included.
    """

    strategy: RuleStrategy
    run: FederatedRun
    grid: Grid
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    result: Result = field(default_factory=Result, init=False)

    def __post_init__(self) -> None:
        self.initial_config = dict(self.train_config)

    def complete(self) -> Result:
        """Run the remaining rounds; return the result."""
        run, rounds = self.run, self.run.rounds or 0
        log(INFO, "Starting %s strategy:", type(self.strategy).__name__)
        log_strategy_start_info(rounds, run.model(), self.train_config, self.evaluate_config)
        self.strategy.summary()
        start = time.monotonic()
        with open_run(self.strategy, run, self.train_config) as (journal, finished):
            self.result = restored_result(journal.rows)
            if not finished:
                if journal.rows:  # a config that changes from round to round resumes as it was
                    stored = restored_config(journal.rows[-1], self.initial_config)
                    self.train_config.update(stored)
                else:
                    self._evaluate_on_server(0, run.output())
                try:
                    for round in range(run.state.round + 1, rounds + 1):
                        log(INFO, "")
                        log(INFO, "[ROUND %s/%s]", round, rounds)
                        row = finite(self._round(round))
                        if round == rounds and run.undone is not None and run.state.steps == 0:
                            raise run.undone
                        journal.add(row, run.state, run.earlier)
                except BudgetSpentError as error:
                    log(WARNING, "the run ends before round %d of %d: %s", round, rounds, error)
                except DivergedError as error:
                    conclude(run, journal, error)
                    raise DivergedError(error.round, error.what, DIVERGED) from None
                conclude(run, journal)
        self.result.arrays = run.output()
        log(INFO, "Strategy execution finished in %.2fs", time.monotonic() - start)
        for line in str(self.result).splitlines():
            log(INFO, "\t%s", line)
        return self.result

    def _round(self, round: int) -> dict[str, Any]:
        """Train and evaluate; return the row of the round."""
        result, layout = self.result, self.run.layout
        trained = self._train(round)
        if trained is not None:
            result.train_metrics_clientapp[round] = trained
        if round % self.run.settings.evaluate_every == 0 or round == self.run.rounds:
            self._evaluate(round, self.run.output())
            self._undo_or_trust(round)
        row = round_row(round, result, self.run.newly_accepted) | self.run.notes
        row |= {"setbacks": counts} if (counts := dict(+self.run.setbacks)) else {}
        self.run.notes = {}
        if self.run.layout != layout:
            layout = self.run.layout
            row["layout"] = {"buffers": list(layout.averaged), "tied": layout.tied}
        return row | changed_config(self.train_config, self.initial_config)

    def _evaluate(self, round: int, arrays: ArrayRecord) -> None:
        """Evaluate the output model on clients and on the server."""
        messages = self.strategy.configure_evaluate(round, arrays, self.evaluate_config, self.grid)
        evaluated = self.strategy.aggregate_evaluate(round, self._replies(messages))
        if evaluated is not None:
            log(INFO, "\t└──> Aggregated MetricRecord: %s", evaluated)
            self.result.evaluate_metrics_clientapp[round] = evaluated
        self._evaluate_on_server(round, arrays)

    def _undo_or_trust(self, round: int) -> None:
        """Undo the steps since the last evaluation where the model's loss is not finite."""
        try:
            check_losses(round, self.result.evaluate_metrics_serverapp.get(round))
        except DivergedError as error:
            self.run.undo_steps(error)
        else:
            self.run.trust()

    def _evaluate_on_server(self, round: int, arrays: ArrayRecord) -> None:
        """Evaluate the output model on the server; round 0 is the initial model."""
        if self.evaluate_fn is None:
            return
        metrics = self.evaluate_fn(round, arrays)
        require(
            metrics is None or isinstance(metrics, MetricRecord),
            f"evaluate_fn returns {type(metrics).__name__}; return a MetricRecord, such as "
            'MetricRecord({"test_loss": loss, "test_accuracy": accuracy}), or None',
        )
        if metrics is not None:
            what = "Global evaluation" if round else "Initial global evaluation results"
            log(INFO, "%s: %s", what, metrics)
            self.result.evaluate_metrics_serverapp[round] = metrics

    def _train(self, round: int) -> MetricRecord | None:
        strategy, run = self.strategy, self.run
        model = run.expected = run.model()
        messages = list(strategy.configure_train(round, model, self.train_config, self.grid))
        run.drawn &= {message.metadata.dst_node_id for message in messages}
        steps = run.state.steps
        metrics: MetricRecord | None
        if run.settings.secure is not None:
            from fedexp.flower.secure.round import secure_aggregate  # needs the legacy workflow

            key, timeout = strategy.arrayrecord_key, run.timeout
            replies = secure_aggregate(
                run.settings.secure, run, self.grid, messages, key=key, round=round, timeout=timeout
            )
            _, metrics = strategy.complete_train(replies)
        else:
            arrays, metrics = strategy.aggregate_train(round, self._replies(messages))
            self._adopt(round, arrays, steps)
        log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
        return metrics

    def _adopt(self, round: int, arrays: ArrayRecord | None, steps: int) -> None:
        """Continue from the model that `aggregate_train` of a subclass returned.

        A subclass sees the replies, so with central privacy only the noised model is accepted.
        """
        run, settings = self.run, self.run.settings
        if arrays is None:
            require("back_to" in run.notes or run.state.steps <= steps, DISCARDED)
            run.state = replace(run.state, round=round)
        elif run.state.round != round or not same_arrays(arrays, run.output()):
            require(settings.privacy is None or settings.noised_by_clients, NOT_NOISED)
            run.adopt(arrays, round)
            log(INFO, "aggregate_train returned another model: training continues from it")

    def _replies(self, messages: Iterable[Message]) -> Replies:
        sent, run = list(messages), self.run
        chunk, quorum = chunk_size(run.state.params), run.settings.quorum
        return Replies(stream_replies(self.grid, sent, run.timeout, chunk, quorum), len(sent))
