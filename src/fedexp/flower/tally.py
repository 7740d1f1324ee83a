"""`Tally`: the means of what clients tell, reply by reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore import log

from fedexp.flower.replies import UnusableReply, checked_weight, content_of, metrics_of

LARGEST = np.finfo(np.float64).max
MetricsFn = Callable[[list[RecordDict], str], MetricRecord]


class Mean:
    """A weighted mean of numbers, or of lists of one length.

    It is a convex combination at every step, so finite values never overflow, however large they
    and their weights are.
    """

    def __init__(self) -> None:
        self._mean: Any = 0.0
        self.weight = 0.0

    def add(self, value: Any, weight: float) -> bool:
        """Add a value, unless it is not finite or a list of another length; return whether."""
        array = np.asarray(value, dtype=np.float64)
        if not np.isfinite(array).all() or (self.weight and array.shape != np.shape(self._mean)):
            return False
        total = self.weight + weight
        with np.errstate(over="ignore"):  # by rounding only, at the largest number there is
            mean = self._mean * (self.weight / total) + array * (weight / total)
        self._mean, self.weight = np.clip(mean, -LARGEST, LARGEST), total
        return True

    def value(self) -> float | list[float]:
        return np.asarray(self._mean).tolist()


class Tally:
    """The means of clients' metrics, weighted by one of them as Flower does it.

    Where a client does not tell its weight, all count the same.

    >>> tally = Tally("num-examples")
    >>> tally.add({"num-examples": 1, "loss": 4.0})
    []
    >>> tally.add({"num-examples": 3, "loss": 0.0, "accuracy": float("nan")})
    ['accuracy']
    >>> tally.means()
    {'loss': 1.0}
    """

    def __init__(self, weight_key: str) -> None:
        self.weight_key, self.weighs = weight_key, True
        self._plain: dict[str, Mean] = {}
        self._weighted: dict[str, Mean] = {}

    def add(self, metrics: Mapping[str, Any]) -> list[str]:
        """Add what a client replies; return the names of values that must be left out."""
        left_out = []
        try:
            weight = checked_weight(metrics, self.weight_key)
        except UnusableReply:
            weight, self.weighs = math.nan, False
        for name, value in metrics.items():
            if name != self.weight_key:
                if not self._plain.setdefault(name, Mean()).add(value, 1.0):
                    left_out.append(name)
                if self.weighs:
                    self._weighted.setdefault(name, Mean()).add(value, weight)
        return left_out

    def means(self) -> dict[str, float | list[float]]:
        chosen = self._weighted if self.weighs else self._plain
        return {name: mean.value() for name, mean in chosen.items() if mean.weight}


def warn_left_out(node: int, names: Iterable[str]) -> None:
    """Log which metrics of a node are not in the means."""
    for name in names:
        text = "node %d: its %r is not a finite number, or a list of another length; it is left "
        log(WARNING, text + "out of the mean", node, name)


def mean_of_evaluations(
    replies: Iterable[Message], weight_key: str, aggregate: MetricsFn | None
) -> MetricRecord | None:
    """The means of what clients measured, or what the user's function makes of it.

    Replies that cannot be used are left out, and a line says which and why. None where none is
    left.
    """
    tally, told = Tally(weight_key), list[RecordDict]()
    for reply in replies:
        node = reply.metadata.src_node_id
        try:
            content = content_of(reply)
            warn_left_out(node, tally.add(metrics_of(content)))
        except UnusableReply as error:
            log(WARNING, "node %d is left out of the evaluation: %s", node, error)
            continue
        told.append(RecordDict(dict(content.metric_records)))
    if not told:
        return None
    return aggregate(told, weight_key) if aggregate else MetricRecord(dict(tally.means()))
