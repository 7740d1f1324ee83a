"""A client's reply, checked before anything of it is used.

`Tally`: the means of what clients tell, reply by reply.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore import log
from torch import Tensor

from fedexp.aggregate import norms, usable
from fedexp.client import ClientRule
from fedexp.errors import UsageError, shown
from fedexp.flower.layout import Arrays, Layout, loaded
from fedexp.flower.request import ABOUT, EXTRAS, ties_in
from fedexp.flower.server import Server

Weighting = Literal["uniform", "num-examples"]
Metrics = Mapping[str, Any]
Kind = TypeVar("Kind", ArrayRecord, MetricRecord)
LONGEST_REASON = 400  # characters of a line about a reply
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30  # so that float32 sums can hold them


VOTES = 3  # replies that decide how the model is laid out; so many are held at a time then


class UnusableReply(UsageError):
    """Why a reply is left out of its round, in one line whatever the client sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(shown(reason, LONGEST_REASON))


@dataclass(frozen=True, eq=False)
class Contribution:
    """What a usable reply adds to a round.

    Attributes:
        delta: Δ_i = w - w_i as one vector.
        weight: p_i; 1 with uniform weights.
        extras: further terms of the sums.
        metrics: what the client tells beside.
        norm: ||Δ_i||.
        rule: the client rule that it says it trained by; None where it does not say.
    """

    delta: Tensor
    weight: float
    extras: Mapping[str, Tensor]
    metrics: Metrics
    norm: float
    rule: str | None


class Reader:
    """Reads the replies of one round.

    Args:
        server: whose model the clients were sent.
        arrays_key: under which they reply theirs; where there is none of that name, the only other.
        weight_key: the metric that weighs a client.
        weighting: "uniform", or "num-examples" to weigh by that metric.
        max_norm: a reply whose update is longer is left out; None for no bound.
        open_parts: what the first usable replies decide of the model's layout: which arrays are
            "buffers", which parameters are "tied"; only before the first step.
    """

    def __init__(
        self,
        server: Server,
        arrays_key: str,
        weight_key: str,
        weighting: Weighting,
        max_norm: float | None = None,
        open_parts: Collection[str] = (),
    ) -> None:
        self.server, self.start = server, server.start_point()
        self.arrays_key, self.weight_key, self.weighting = arrays_key, weight_key, weighting
        self.extras = extras_of(server.algorithm.client)
        self.max_norm, self.open_parts = max_norm, open_parts

    def read(self, reply: Message) -> Contribution:
        """What the reply adds; raises `UnusableReply` for one that must not enter the model."""
        content = content_of(reply)
        metrics = metrics_of(content)
        weight = 1.0 if self.weighting == "uniform" else checked_weight(metrics, self.weight_key)
        arrays = self._model(content)
        delta, extras = self.server.contribution(arrays, self.start)
        extras |= {name: self._extra(content, name) for name in self.extras}
        if not usable(delta[None], {name: value[None] for name, value in extras.items()}).item():
            raise UnusableReply(f"its values are not finite ({_first_bad(arrays)})")
        norm = norms(delta[None]).item()
        if self.max_norm is not None and norm > self.max_norm:
            raise UnusableReply(
                f"the norm of its update is {norm:.3g}, more than max_norm={self.max_norm:g}"
            )
        rule = about(content).get("rule")
        return Contribution(delta, weight, extras, metrics, norm, rule and str(rule))

    def settled(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Let the first usable replies decide by majority how the model is laid out, where that is
        open, so that no single client can; then hand on all of them, the first ones included."""
        source, held = iter(replies), list[Message]()
        votes: Counter[Layout] = Counter()
        while self.open_parts and votes.total() < VOTES and len(held) < 2 * VOTES:
            reply = next(source, None)
            if reply is None:
                break
            held.append(reply)
            votes.update(self._vote(reply))
        if votes:
            (layout, _), *_ = votes.most_common(1)
            if layout != self.server.layout:
                self.server.lay_out(layout)
                self.start = self.server.start_point()
            self.open_parts = ()
        while held:
            yield held.pop(0)
        yield from source

    def _vote(self, reply: Message) -> list[Layout]:
        """Return the layout that a usable reply fits; nothing for one that is not usable."""
        try:
            content = content_of(reply)
            arrays = _loaded(_only(content.array_records, self.arrays_key, "model"))
            layout = self._layout(content, arrays)
        except UnusableReply:
            return []
        sound = layout.misfit(arrays) is None
        return [layout] if sound and all(np.isfinite(v).all() for v in arrays.values()) else []

    def _model(self, content: RecordDict) -> Arrays:
        arrays = _loaded(_only(content.array_records, self.arrays_key, "model"))
        if (reason := self._layout(content, arrays).misfit(arrays)) is not None:
            raise UnusableReply(reason)
        return arrays

    def _layout(self, content: RecordDict, arrays: Arrays) -> Layout:
        """Return the layout that a reply fits: as its client reports it where that is still open;
        of a client that reports none, without ties that its training broke."""
        layout, said = self.server.layout, about(content)
        if "buffers" in said:
            buffers = _strings(said["buffers"])
            if self.open_parts and "buffers" not in self.open_parts:
                buffers = list(layout.averaged)
            try:
                reported = layout.with_kinds(buffers, ties_in(said, "") or {})
            except UsageError as error:
                raise UnusableReply(f"its report of the model's parts is wrong: {error}") from None
            if reported != layout and not self.open_parts:
                raise UnusableReply(
                    "it reports other buffers or tied weights than the strategy reckons with; give "
                    "the strategy model="
                )
            return reported
        if not self.open_parts or not {*layout.tied, *layout.tied.values()} <= arrays.keys():
            return layout
        broken = layout.broken_ties(arrays)
        tied = {name: source for name, source in layout.tied.items() if name not in broken}
        return layout.with_kinds(layout.averaged, tied)

    def _extra(self, content: RecordDict, name: str) -> Tensor:
        """A vector that the client rule adds; the server's step needs it of every client."""
        rule = type(self.server.algorithm.client).__name__
        found = _loaded(content.array_records.get(EXTRAS, ArrayRecord())).get(name)
        if found is None:
            raise UnusableReply(
                f"it has no {name!r} in {EXTRAS!r}, which {rule} needs; use "
                "fedexp.flower.LocalRule in the ClientApp"
            )
        if found.shape != self.start.shape or found.dtype.kind != "f":
            raise UnusableReply(f"its {name!r} is not a vector of {len(self.start)} numbers")
        # torch knows neither numpy's longest fractions nor bytes in another order
        with np.errstate(over="ignore"):  # what overflows is infinite, and refused
            return torch.from_numpy(found.astype(np.float64)).to(self.start.dtype)


def _strings(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def about(content: RecordDict) -> Mapping[str, Any]:
    """Return what a reply says of itself, which a plain ClientApp's does not."""
    return dict(content.config_records.get(ABOUT, ConfigRecord()))


def content_of(reply: Message) -> RecordDict:
    """The content of a reply; raises `UnusableReply` where it is an error."""
    if reply.has_error():
        said = str(reply.error.reason or f"error {reply.error.code}").strip()
        raise UnusableReply(said.splitlines()[-1] if said else "an error without a reason")
    return reply.content


def metrics_of(content: RecordDict) -> Metrics:
    """The one metric record of a reply; nothing where it has none."""
    if not content.metric_records:
        return {}
    return dict(_only(content.metric_records, "metrics", "metrics"))


def checked_weight(metrics: Metrics, key: str) -> float:
    """The weight that a client tells; raises `UnusableReply` for what is none."""
    value = metrics.get(key)
    if value is None:
        raise UnusableReply(
            f"its metrics have no {key!r}, by which clients are weighed; reply it, or set "
            "weighting='uniform'"
        )
    if isinstance(value, list) or not LEAST_WEIGHT <= value <= MOST_WEIGHT:
        raise UnusableReply(f"its {key!r} is {value}, which is no weight")
    return float(value)


def extras_of(rule: ClientRule) -> tuple[str, ...]:
    """The names of what a client rule adds to the sums."""
    nothing = torch.zeros(0)
    _, extras = rule.end_round(
        nothing, 1.0, rule.init_broadcast(nothing), rule.init_client_state(nothing)
    )
    return tuple(extras)


def _only(records: Mapping[str, Kind], key: str, what: str) -> Kind:
    """The record of that name, or the only one that is not ours."""
    others = {name: value for name, value in records.items() if not name.startswith("fedexp.")}
    if key in others:
        return others[key]
    if len(others) != 1:
        raise UnusableReply(f"it has {len(others)} records with a {what} and none called {key!r}")
    return next(iter(others.values()))


def _loaded(record: ArrayRecord) -> Arrays:
    try:
        return loaded(record)
    except UsageError as error:
        raise UnusableReply(str(error)) from error


def _first_bad(arrays: Arrays) -> str:
    """Which array has a value that is not finite."""
    for name, value in arrays.items():
        if value.dtype.kind == "f" and not math.isfinite(value.sum(dtype="float64")):
            return f"{name!r}"
    return "the norm of its update"


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
