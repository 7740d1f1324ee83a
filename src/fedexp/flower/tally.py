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

MetricsFn = Callable[[list[RecordDict], str], MetricRecord]


class Mean:
    """A weighted mean of numbers, or of lists of one length."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.weight = 0.0

    def add(self, value: Any, weight: float) -> None:
        """Values that are not finite, or lists of another length, are left out."""
        array = np.asarray(value, dtype=np.float64)
        if not np.isfinite(array).all() or (self.weight and array.shape != np.shape(self.total)):
            return
        self.total, self.weight = self.total + weight * array, self.weight + weight

    def value(self) -> float | list[float]:
        mean = np.asarray(self.total / self.weight)
        return mean.tolist()


class Tally:
    """The means of clients' metrics, weighted by one of them as Flower does it.

    Where a client does not tell its weight, all count the same.

    >>> tally = Tally("num-examples")
    >>> tally.add({"num-examples": 1, "loss": 4.0})
    >>> tally.add({"num-examples": 3, "loss": 0.0})
    >>> tally.means()
    {'loss': 1.0}
    """

    def __init__(self, weight_key: str) -> None:
        self.weight_key, self.weighs = weight_key, True
        self._plain: dict[str, Mean] = {}
        self._weighted: dict[str, Mean] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        try:
            weight = checked_weight(metrics, self.weight_key)
        except UnusableReply:
            weight, self.weighs = math.nan, False
        for name, value in metrics.items():
            if name != self.weight_key:
                self._plain.setdefault(name, Mean()).add(value, 1.0)
                if self.weighs:
                    self._weighted.setdefault(name, Mean()).add(value, weight)

    def means(self) -> dict[str, float | list[float]]:
        chosen = self._weighted if self.weighs else self._plain
        return {name: mean.value() for name, mean in chosen.items() if mean.weight}


def mean_of_evaluations(
    replies: Iterable[Message], weight_key: str, aggregate: MetricsFn | None
) -> MetricRecord | None:
    """The means of what clients measured, or what the user's function makes of it.

    Replies that cannot be used are left out, and a line says which and why. None where none is
    left.
    """
    tally, told = Tally(weight_key), list[RecordDict]()
    for reply in replies:
        try:
            content = content_of(reply)
            tally.add(metrics_of(content))
        except UnusableReply as error:
            node = reply.metadata.src_node_id
            log(WARNING, "node %d is left out of the evaluation: %s", node, error)
            continue
        told.append(RecordDict(dict(content.metric_records)))
    if not told:
        return None
    return aggregate(told, weight_key) if aggregate else MetricRecord(dict(tally.means()))
