"""Metrics that clients report, averaged reply by reply.

Flower's `aggregate_metricrecords` needs a list of all replies, and one NaN or overflow in it spoils
the mean. `WeightedMetrics` needs one reply at a time, and leaves out what is not finite, of another
length than most, or too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore import log
from numpy.typing import NDArray

from fedexp.errors import UsageError, require, shown
from fedexp.flower.transport import only_record, reason_of, reply_content

Metrics = Mapping[str, Any]
Kind = tuple[str, tuple[int, ...]]  # the name of a metric, and its shape
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
MIN_WEIGHT, MAX_WEIGHT = 1e-30, 1e30  # the range of weights whose float32 sums stay finite
LARGEST = np.finfo(np.float64).max
MAX_SIZE = 20_000  # characters of names and numbers that a reply may add to the means
LEFT_OUT = (
    "node %d: %d of its metrics are left out of the means, because they are not finite, of another "
    f"length than most clients', or beyond {MAX_SIZE} characters and numbers in all: %s"
)


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
    0, all count the same. A metric is a number, or a list of some length, as most clients report
    it. What is left out is logged with its node.

    >>> metrics = WeightedMetrics("num-examples")
    >>> metrics.add(17, {"num-examples": 1, "loss": 4.0})
    >>> metrics.add(18, {"num-examples": 3, "loss": 0.0, "accuracy": float("nan")})
    >>> metrics.means()
    {'loss': 1.0}
    """

    def __init__(self, weight_key: str) -> None:
        self.weight_key, self.is_weighted = weight_key, True
        self._nodes: dict[Kind, list[int]] = {}
        self._uniform: dict[Kind, _RunningMean] = {}
        self._weighted: dict[Kind, _RunningMean] = {}

    def add(self, node: int, metrics: Metrics) -> None:
        """Add the metrics of one client; log those that cannot be in a mean."""
        left_out, weight, room = list[str](), 0.0, MAX_SIZE
        try:
            if metrics.get(self.weight_key) != 0:
                weight = client_weight(metrics, self.weight_key)
        except UsageError:
            self.is_weighted = False
        for name, value in metrics.items():
            if name == self.weight_key:
                continue
            array = np.asarray(value, dtype=np.float64)
            size = len(name) + array.size
            if size > room or not np.isfinite(array).all():
                left_out.append(name)
                continue
            room -= size
            kind = name, array.shape
            self._nodes.setdefault(kind, []).append(node)
            self._uniform.setdefault(kind, _RunningMean()).add(array, 1.0)
            if weight:
                self._weighted.setdefault(kind, _RunningMean()).add(array, weight)
        log_left_out({node: left_out} if left_out else {})

    def means(self) -> dict[str, float | list[float]]:
        """Return the mean of each metric over the clients that reported it; log the others."""
        means = self._weighted if self.is_weighted and self._weighted else self._uniform
        shapes, left_out = dict[str, tuple[int, ...]](), dict[int, list[str]]()
        for (name, shape), nodes in sorted(self._nodes.items(), key=lambda item: -len(item[1])):
            if shapes.setdefault(name, shape) != shape:
                for node in nodes:
                    left_out.setdefault(node, []).append(name)
        log_left_out(left_out)
        return {name: means[name, s].value() for name, s in shapes.items() if (name, s) in means}


class _RunningMean:
    """A weighted mean of numbers, or of lists of equal length.

    It is a convex combination at every step, so finite values never overflow, however large they
    and their weights are.
    """

    def __init__(self) -> None:
        self._mean: Any = 0.0
        self._weight = 0.0

    def add(self, value: NDArray[np.float64], weight: float) -> None:
        total = self._weight + weight
        with np.errstate(over="ignore"):  # only by rounding, at the largest float64
            mean = self._mean * (self._weight / total) + value * (weight / total)
        self._mean, self._weight = np.clip(mean, -LARGEST, LARGEST), total

    def value(self) -> float | list[float]:
        return np.asarray(self._mean).tolist()


def log_left_out(names: Mapping[int, Collection[str]]) -> None:
    """Log which metrics of nodes are not in the means, in a line for each node."""
    for node, metrics in names.items():
        log(WARNING, LEFT_OUT, node, len(metrics), shown(", ".join(map(repr, metrics)), 200))


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
            metrics.add(node, reply_metrics(content))
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
