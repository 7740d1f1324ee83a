"""The rows of a run on Flower, in the form of the simulator's, and a result out of them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedexp.errors import DivergedError

Row = dict[str, Any]
SCORES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
OTHER_NAMES = {"accuracy": "test_accuracy", "acc": "test_accuracy", "loss": "test_loss"}
PARTS = {
    "trained": "train_metrics_clientapp",
    "evaluated": "evaluate_metrics_clientapp",
    "central": "evaluate_metrics_serverapp",
}
OURS = {
    "round",
    "local_lr",
    "accepted",
    "initial",
    "config",
    "layout",
    *PARTS,
}  # not for clients' metrics


def row_of(round: int, result: Result, accepted: Sequence[str]) -> Row:
    """The row of a round: columns as the simulator has them, and Flower's records whole."""
    parts = {name: getattr(result, of).get(round) for name, of in PARTS.items()}
    trained: Mapping[str, Any] = parts["trained"] or {}
    row: Row = {"round": round, "server_lr": None, "local_lr": None}
    row |= {n: v for n, v in trained.items() if n not in OURS and not isinstance(v, list)}
    row |= dict.fromkeys(SCORES) | scores(parts["evaluated"]) | scores(parts["central"])
    row |= {name: int(row[name]) for name in ("clients", "dropped", "unanswered") if name in row}
    row |= {name: dict(record) for name, record in parts.items() if record is not None}
    if accepted:
        row["accepted"] = list(accepted)
    if round == 1 and 0 in result.evaluate_metrics_serverapp:
        row["initial"] = dict(result.evaluate_metrics_serverapp[0])
    return row


def changed(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a strategy has made of the config that it was given, e.g. a rate that decays."""
    return {
        name: value
        for name, value in config.items()
        if name != "server-round" and value != given.get(name) and not isinstance(value, bytes)
    }


def scores(record: Mapping[str, Any] | None) -> dict[str, float]:
    """The losses and accuracies that a report draws, by whatever usual names they have.

    >>> scores({"eval_acc": 0.5, "loss": 1.0, "num-examples": 10, "test_loss": 2.0})
    {'test_accuracy': 0.5, 'test_loss': 2.0}
    """
    found: dict[str, float] = {}
    for name, value in (record or {}).items():
        plain = name.lower().replace("-", "_")
        for prefix in ("eval_", "test_"):
            plain = plain.removeprefix(prefix)
        column = name if name in SCORES else OTHER_NAMES.get(plain)
        if column is not None and not isinstance(value, list):
            found[column] = float(value)
    return found


def check_scores(row: Row) -> None:
    """Raise `DivergedError` where the server itself measured a loss that is not finite.

    What clients measure ends no run: one client could.
    """
    for name, value in scores(row.get("central")).items():
        if name in ("train_loss", "test_loss") and not math.isfinite(value):
            raise DivergedError(row["round"], f"{name} is {value}")


def restored_result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """The result of the rounds that are stored, without its arrays."""
    result = Result()
    for row in rows:
        for name, of in PARTS.items():
            if name in row:
                getattr(result, of)[row["round"]] = _record(row[name])
        if "initial" in row:
            result.evaluate_metrics_serverapp[0] = _record(row["initial"])
    return result


def _record(values: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in values.items() if value is not None})
