"""`conduct`: the rounds of a strategy, one after another, kept on the disk where asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info
from flwr.supercore import log

from fedexp.errors import DivergedError, require
from fedexp.flower.gather import Gathered, held_at_once, receive
from fedexp.flower.layout import same_arrays
from fedexp.flower.resume import Book, changed, check_scores, opened, restored_result, row_of
from fedexp.flower.training import Training
from fedexp.privacy import BudgetSpentError

if TYPE_CHECKING:
    from fedexp.flower.strategy import RuleStrategy

DISCARDED = (
    "aggregate_train returned no arrays, although the server has taken its step; return those of "
    "super().aggregate_train, or changed ones"
)
NOT_NOISED = (
    "aggregate_train returned another model than super().aggregate_train did, and it may hold the "
    "clients' updates without noise; with central privacy return that one unchanged, or leave "
    "aggregate_train as it is"
)
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Configs = tuple[ConfigRecord, ConfigRecord]


def conduct(
    strategy: RuleStrategy,
    training: Training,
    grid: Grid,
    configs: Configs,
    evaluate_fn: EvaluateFn | None,
) -> Result:
    """Run the rounds that are left of a run, and return what it came to."""
    rounds = training.rounds or 0
    log(INFO, "Starting %s strategy:", type(strategy).__name__)
    log_strategy_start_info(rounds, training.server.model(), *configs)
    strategy.summary()
    began = time.monotonic()
    with opened(strategy, training, configs[0]) as book:
        result = restored_result(book.rows)
        if not book.over:
            _evaluate_first(book, training, evaluate_fn, result)
            conductor = Conductor(strategy, training, grid, configs, evaluate_fn, result)
            if book.rows:  # a config that changes round by round goes on as it was left
                conductor.train_config.update(book.rows[-1].get("config", {}))
            _train(conductor, book, rounds)
    result.arrays = training.server.output()
    log(INFO, "Strategy execution finished in %.2fs", time.monotonic() - began)
    for line in str(result).splitlines():
        log(INFO, "\t%s", line)
    return result


def _train(conductor: Conductor, book: Book, rounds: int) -> None:
    training = conductor.training
    try:
        for round in range(training.server.state.round + 1, rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", round, rounds)
            book.add(conductor.round(round), training.server.state)
    except BudgetSpentError as error:
        log(WARNING, "the run ends before round %d of %d: %s", round, rounds, error)
    except DivergedError as error:
        book.finish(error)
        raise
    book.finish(None)


def _evaluate_first(
    book: Book, training: Training, evaluate_fn: EvaluateFn | None, result: Result
) -> None:
    """The first model, unless the run is past it."""
    if evaluate_fn is None or book.rows:
        return
    found = evaluate_fn(0, training.server.output())
    log(INFO, "Initial global evaluation results: %s", found)
    if found is not None:
        result.evaluate_metrics_serverapp[0] = found


class Conductor:
    """Takes a strategy through one round after another."""

    def __init__(
        self,
        strategy: RuleStrategy,
        training: Training,
        grid: Grid,
        configs: Configs,
        evaluate_fn: EvaluateFn | None,
        result: Result,
    ) -> None:
        self.strategy, self.training, self.grid = strategy, training, grid
        self.train_config, self.evaluate_config = configs
        self.given = dict(self.train_config)
        self.evaluate_fn, self.result = evaluate_fn, result

    def round(self, round: int) -> dict[str, Any]:
        """Train, evaluate, and return the row of the round."""
        result, before = self.result, self.training.server.layout
        trained = self._train(round)
        if trained is not None:
            result.train_metrics_clientapp[round] = trained
        arrays = self.training.server.output()
        measured = self._measured_by_clients(round, arrays)
        if measured is not None:
            log(INFO, "\t└──> Aggregated MetricRecord: %s", measured)
            result.evaluate_metrics_clientapp[round] = measured
        central = self.evaluate_fn(round, arrays) if self.evaluate_fn else None
        if central is not None:
            log(INFO, "Global evaluation: %s", central)
            result.evaluate_metrics_serverapp[round] = central
        row = row_of(round, result, self.training.newly_accepted)
        if self.training.server.layout != before:
            layout = self.training.server.layout
            row["layout"] = {"buffers": list(layout.averaged), "tied": layout.tied}
        if config := changed(self.train_config, self.given):
            row["config"] = config
        check_scores(row)
        return row

    def _train(self, round: int) -> MetricRecord | None:
        strategy, output = self.strategy, self.training.server.output()
        strategy.last_output = output
        messages = list(strategy.configure_train(round, output, self.train_config, self.grid))
        steps = self.training.server.state.steps
        metrics: MetricRecord | None
        if self.training.settings.secure is not None:
            _, metrics = strategy.complete_train(self._secure(round, messages), {})
        else:
            arrays, metrics = strategy.aggregate_train(round, self._replies(messages))
            self._adopt(round, arrays, steps)
        log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
        return metrics

    def _adopt(self, round: int, arrays: ArrayRecord | None, steps: int) -> None:
        """Take the model that `aggregate_train` returns, where a subclass returns its own.

        A subclass sees the replies, so under central privacy only the noised model is taken.
        """
        server, privacy = self.training.server, self.training.settings.privacy
        if arrays is None:
            require(server.state.steps == steps, DISCARDED)
            server.state = replace(server.state, round=round)
        elif server.state.round != round or not same_arrays(arrays, server.output()):
            require(privacy is None or privacy.noised_by_clients, NOT_NOISED)
            server.adopt(arrays, round)
            log(INFO, "aggregate_train returned a model of its own: training continues from it")

    def _replies(self, messages: Iterable[Message]) -> Iterable[Message]:
        at_once = held_at_once(self.training.server.state.params)
        return receive(self.grid, messages, self.training.timeout, at_once)

    def _secure(self, round: int, messages: list[Message]) -> Gathered:
        from fedexp.flower.secure_round import secure_gather  # needs Flower's legacy workflow

        training = self.training
        assert training.settings.secure is not None
        return secure_gather(
            training.settings.secure,
            training.server,
            self.grid,
            messages,
            key=self.strategy.arrayrecord_key,
            round=round,
            timeout=training.timeout,
        )

    def _measured_by_clients(self, round: int, arrays: ArrayRecord) -> MetricRecord | None:
        messages = self.strategy.configure_evaluate(round, arrays, self.evaluate_config, self.grid)
        return self.strategy.aggregate_evaluate(round, self._replies(messages))
