"""Metrics that clients report, averaged reply by reply.

Flower's `aggregate_metricrecords` needs a list of all replies, and one NaN or overflow in it spoils
the mean. `WeightedMetrics` needs one reply at a time, and leaves out values that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore import log

from fedexp.errors import UsageError, require
from fedexp.flower.transport import only_record, reason_of, reply_content

Metrics = Mapping[str, Any]
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
MIN_WEIGHT, MAX_WEIGHT = 1e-30, 1e30  # the range of weights whose float32 sums stay finite
LARGEST = np.finfo(np.float64).max


def reply_metrics(content: RecordDict) -> Metrics:
    """Return the one metric record of a reply; {} where it has none."""
    if not content.metric_records:
        return {}
    return dict(only_record(content.metric_records, "metrics", "metrics")[1])


def client_weight(metrics: Metrics, key: str) -> float:
    """Return the weight that a client reports; raise `UsageError` for an invalid one."""
    require(
        metrics.get(key) is not None,
        f"its metrics have no {key!r}, by which clients are weighted; reply it, or set "
        "weighting='uniform'",
    )
    value = metrics[key]
    is_weight = not isinstance(value, list) and MIN_WEIGHT <= value <= MAX_WEIGHT
    require(is_weight, f"its {key!r} is {value}, which is not a weight; reply a positive number")
    return float(value)


class WeightedMetrics:
    """Means of clients' metrics, weighted by one of them as in Flower.

    A client of weight 0 adds nothing. Where any client does not report its weight, or all report
    0, all count the same.

    >>> metrics = WeightedMetrics("num-examples")
    >>> metrics.add({"num-examples": 1, "loss": 4.0})
    []
    >>> metrics.add({"num-examples": 3, "loss": 0.0, "accuracy": float("nan")})
    ['accuracy']
    >>> metrics.means()
    {'loss': 1.0}
    """

    def __init__(self, weight_key: str) -> None:
        self.weight_key, self.is_weighted = weight_key, True
        self._uniform: dict[str, _RunningMean] = {}
        self._weighted: dict[str, _RunningMean] = {}

    def add(self, metrics: Metrics) -> list[str]:
        """Add the metrics of one client; return the names of values that were left out."""
        left_out, weight = list[str](), 0.0
        try:
            if metrics.get(self.weight_key) != 0:
                weight = client_weight(metrics, self.weight_key)
        except UsageError:
            self.is_weighted = False
        for name, value in metrics.items():
            if name != self.weight_key:
                if not self._uniform.setdefault(name, _RunningMean()).add(value, 1.0):
                    left_out.append(name)
                if weight:
                    self._weighted.setdefault(name, _RunningMean()).add(value, weight)
        return left_out

    def means(self) -> dict[str, float | list[float]]:
        """Return the mean of each metric over the clients that reported it."""
        means = self._weighted if self.is_weighted and self._weighted else self._uniform
        return {name: mean.value() for name, mean in means.items() if mean.weight}


class _RunningMean:
    """A weighted mean of numbers, or of lists of equal length.

    It is a convex combination at every step, so finite values never overflow, however large they
    and their weights are.
    """

    def __init__(self) -> None:
        self._mean: Any = 0.0
        self.weight = 0.0

    def add(self, value: Any, weight: float) -> bool:
        """Add a value; return False for one that is not finite or a list of another length."""
        array = np.asarray(value, dtype=np.float64)
        if not np.isfinite(array).all() or (self.weight and array.shape != np.shape(self._mean)):
            return False
        total = self.weight + weight
        with np.errstate(over="ignore"):  # only by rounding, at the largest float64
            mean = self._mean * (self.weight / total) + array * (weight / total)
        self._mean, self.weight = np.clip(mean, -LARGEST, LARGEST), total
        return True

    def value(self) -> float | list[float]:
        return np.asarray(self._mean).tolist()


def log_left_out(node: int, names: Iterable[str]) -> None:
    """Log which metrics of a node are not in the means."""
    for name in names:
        text = "node %d: its %r is not a finite number, or a list of another length; it is left "
        log(WARNING, text + "out of the mean", node, name)


def aggregate_evaluations(
    replies: Iterable[Message], weight_key: str, aggregate: MetricsFn | None
) -> MetricRecord | None:
    """Return the means of clients' evaluation metrics; None where no reply is usable.

    A reply that cannot be used is left out, and the log names its node and the reason.

    Args:
        replies: to the evaluate messages.
        weight_key: the metric that weights a client.
        aggregate: the user's own function of all metric records, in place of the means.
    """
    metrics, records = WeightedMetrics(weight_key), list[RecordDict]()
    for reply in replies:
        node = reply.metadata.src_node_id
        try:
            content = reply_content(reply)
            was_weighted = metrics.is_weighted
            log_left_out(node, metrics.add(reply_metrics(content)))
        except UsageError as error:
            log(WARNING, "node %d is left out of the evaluation: %s", node, reason_of(error))
            continue
        if was_weighted and not metrics.is_weighted:
            text = "node %d: its evaluation has no %r that is a weight, so all clients count the "
            text += "same in this evaluation; reply it from every client"
            log(WARNING, text, node, weight_key)
        records.append(RecordDict(dict(content.metric_records)))
    if not records:
        return None
    return aggregate(records, weight_key) if aggregate else MetricRecord(dict(metrics.means()))
