"""The replies of a training round: each checked, then summed as it arrives.

`ReplyReader` turns a reply into a `ClientUpdate`, or raises `UsageError` with the reason;
`aggregate_replies` adds the updates up a few at a time (`RoundSums`), so that a server never holds
many models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from logging import WARNING
from operator import add
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore import log
from torch import Tensor

from fedexp.aggregate import Aggregate, norms, usable
from fedexp.client import zero_extras
from fedexp.clipping import Limits, clipped_sums, next_medians, split_medians
from fedexp.engine.base import SUMMED_BYTES
from fedexp.engine.state import largest_norm
from fedexp.errors import UsageError, require
from fedexp.flower.layout import Arrays, Layout, loaded, to_vector
from fedexp.flower.metrics import (
    Metrics,
    MetricsFn,
    WeightedMetrics,
    client_weight,
    reply_metrics,
)
from fedexp.flower.request import EXTRAS, REPLY_INFO, read_ties
from fedexp.flower.transport import is_unanswered, only_record, reason_of, reply_content

if TYPE_CHECKING:
    from fedexp.flower.server import Server
    from fedexp.privacy import Mechanism

Weighting = Literal["uniform", "num-examples"]
LAYOUT_VOTES = 3  # usable replies that decide the layout of the model, in memory until then
MAX_CHUNK = 64  # replies held in memory at most
LARGEST_SHARE = 1e33  # weight times norm in a sum; 10,000 clients of it fit float32
TIE = (
    "as many clients report one layout of the model (which arrays are buffers, which are tied) as "
    "another; give the strategy model="
)


class DivergedReplyError(UsageError):
    """A reply has values that are not finite or too long, as after training that diverged."""


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """One client's update, from a usable reply.

    Attributes:
        delta: Δ_i = w - w_i, one vector [d].
        weight: p_i; 1 with uniform weights.
        extras: further vectors to be summed, by name.
        metrics: the client's train metrics.
        norm: ||Δ_i||.
        shares: p_i times the norm of the update and of each extra.
        rule: the client rule that the reply names; None where it names none.
    """

    delta: Tensor
    weight: float
    extras: Mapping[str, Tensor]
    metrics: Metrics
    norm: float
    shares: Mapping[str, float]
    rule: str | None


@dataclass(frozen=True, eq=False)
class AggregatedReplies:
    """The sums of a round and the nodes they came from.

    Attributes:
        aggregate: the sums.
        accepted: nodes whose replies are in the sums; one that replied twice is listed twice.
        dropped: number of replies that could not be used.
        unanswered: nodes that did not answer.
        client_metrics: means of the clients' train metrics.
        metrics: further numbers for the round's record.
        longest: the node with the longest update, and its norm.
        suspect: the node that has added most to one of the sums, relative to the others.
        rules: by node, the client rule that its reply names; None where it names none.
        diverged: number of replies dropped because their values are not finite or too long.
    """

    aggregate: Aggregate
    accepted: tuple[int, ...] = ()
    dropped: int = 0
    unanswered: tuple[int, ...] = ()
    client_metrics: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    longest: tuple[int, float] | None = None
    suspect: Suspect | None = None
    rules: dict[int, str | None] = field(default_factory=dict)
    diverged: int = 0


def aggregate_replies(
    replies: Iterable[Message],
    reader: ReplyReader,
    aggregate: MetricsFn | None = None,
    mechanism: Mechanism | None = None,
) -> AggregatedReplies:
    """Sum the usable replies; log the node and the reason of every other one.

    Args:
        replies: in any order, iterated once.
        reader: checks them.
        aggregate: the user's own function of all metric records, in place of the means.
        mechanism: of privacy, clips updates before they are summed.
    """
    metrics, records = WeightedMetrics(reader.weight_key), list[RecordDict]()
    longest, rules, shares = None, dict[int, str | None](), Shares()
    accepted, unanswered, dropped, diverged = [], [], 0, 0
    sums = RoundSums(reader, mechanism)
    for reply in reader.resolve_layout(replies):
        node = reply.metadata.src_node_id
        try:
            update = reader.read(reply)
        except UsageError as error:
            log(WARNING, "node %d is left out of this round: %s", node, reason_of(error))
            unanswered += [node] if is_unanswered(reply) else []
            dropped += not is_unanswered(reply)
            diverged += isinstance(error, DivergedReplyError)
            continue
        sums.add(update)
        shares.add(node, update.shares)
        metrics.add(node, update.metrics)
        if aggregate is not None:
            records.append(RecordDict(dict(reply.content.metric_records)))
        accepted.append(node)
        rules[node] = update.rule
        if longest is None or update.norm > longest[1]:
            longest = node, update.norm
    return AggregatedReplies(
        sums.total(),
        tuple(accepted),
        dropped,
        tuple(unanswered),
        dict(aggregate(records, reader.weight_key)) if aggregate and records else metrics.means(),
        longest=longest,
        suspect=shares.suspect(),
        rules=rules,
        diverged=diverged,
    )


class Suspect(NamedTuple):
    """A node with its share, 0 to 1, of the sum of norms of what a name stands for."""

    share: float
    node: int
    name: str


class Shares:
    """Who has added most to each sum of a round."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._most: dict[str, tuple[float, int]] = {}

    def add(self, node: int, shares: Mapping[str, float]) -> None:
        """Add what a client contributes, by name."""
        for name, value in shares.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._most[name] = max(self._most.get(name, (0.0, node)), (value, node))

    def suspect(self) -> Suspect | None:
        """Return the node with the largest share of a sum."""
        most = (
            Suspect(value / (self._sums[name] or 1.0), node, name)
            for name, (value, node) in self._most.items()
        )
        return max(most, default=None)


def chunk_size(params: Tensor) -> int:
    """Return how many models of this size may be held in memory at a time; at least 1."""
    return max(1, min(MAX_CHUNK, SUMMED_BYTES // max(1, params.nbytes)))


class RoundSums:
    """The sums of a round, to which updates are added in chunks [M, d] as in the simulator.

    Where the algorithm has a bound and no medians yet, in the first round, chunks are also stored
    in a temporary file, and summed again when their norms are known.

    Args:
        reader: of the round; its layout is decided before the first update.
        mechanism: of privacy, clips a chunk before it is summed, instead of the bound.
    """

    def __init__(self, reader: ReplyReader, mechanism: Mechanism | None) -> None:
        self.reader, self.mechanism = reader, mechanism
        self._pending: list[ClientUpdate] = []
        self._total: Aggregate | None = None
        self._file: IO[bytes] | None = None
        self._stored, self._names = 0, list[str]()

    def add(self, update: ClientUpdate) -> None:
        """Add an update; it stays in memory until there are enough for a chunk."""
        self._pending.append(update)
        if len(self._pending) >= chunk_size(self.reader.start):
            self._add_chunk()

    def total(self) -> Aggregate:
        """Return the sums of all updates; call it once."""
        params, server = self.reader.start, self.reader.server
        if self._pending:
            self._add_chunk()
        if self._total is None:
            return Aggregate.zero(params.numel(), params.dtype)
        if self._file is None:
            return self._total
        _, medians = split_medians(server.state.server)
        limits = server.algorithm.limits(next_medians(medians, self._total))
        with self._file as file:
            file.seek(0)
            chunks = (Chunk.read(file, self._names) for _ in range(self._stored))
            return reduce(add, (self._sum(chunk, limits) for chunk in chunks))

    def _add_chunk(self) -> None:
        updates, self._pending = self._pending, []
        names = updates[0].extras
        chunk = Chunk(
            torch.stack([update.delta for update in updates]),
            torch.tensor([update.weight for update in updates], dtype=torch.float64),
            {name: torch.stack([update.extras[name] for update in updates]) for name in names},
        )
        server, limits = self.reader.server, None
        if self.mechanism is None:
            limits = server.algorithm.limits(server.state.server)
        sums = self._sum(chunk, limits)
        self._total = sums if self._total is None else self._total + sums
        if limits is not None and not limits.are_known:
            self._file = self._file or cast(IO[bytes], TemporaryFile())  # noqa: SIM115
            chunk.write(self._file)
            self._stored, self._names = self._stored + 1, sorted(chunk.extras)

    def _sum(self, chunk: Chunk, limits: Limits | None) -> Aggregate:
        deltas, weights, extras = chunk
        if limits is not None:
            return clipped_sums(deltas, weights, extras, limits)
        if self.mechanism is not None:
            extras = {**extras, **self.mechanism.bits(deltas)}
            deltas = self.mechanism.clipped(deltas)
        return Aggregate.of(deltas, weights, extras)


class Chunk(NamedTuple):
    """Updates [M, d] of some clients, their weights [M] and their extras [M, ...]."""

    deltas: Tensor
    weights: Tensor
    extras: dict[str, Tensor]

    def write(self, file: IO[bytes]) -> None:
        """Append it to a file."""
        for values in (self.deltas, self.weights, *map(self.extras.get, sorted(self.extras))):
            np.save(file, cast(Tensor, values).numpy())

    @classmethod
    def read(cls, file: IO[bytes], names: Iterable[str]) -> Chunk:
        """Return the next one of a file, with the names of its extras."""
        deltas, weights = torch.from_numpy(np.load(file)), torch.from_numpy(np.load(file))
        return cls(deltas, weights, {n: torch.from_numpy(np.load(file)) for n in sorted(names)})


@dataclass(eq=False)
class ReplyReader:
    """Reads the replies of one round.

    Args:
        server: whose model the clients were sent.
        arrays_key: of the model in a reply; where there is none of that name, the only other one.
        weight_key: the metric that weights a client.
        weighting: "uniform", or "num-examples" to weight by that metric.
        max_norm: a reply whose update is longer is left out; None for no bound.
        undecided: parts of the model's layout that the first usable replies decide: which arrays
            are "buffers", which parameters are "tied"; only before the first step.
        noise: clip and noise with which clients must have marked their updates (local privacy).

    Attributes:
        start: the parameters that the clients were sent, one vector [d].
        extras: names of the further vectors that a reply must have.
    """

    server: Server
    arrays_key: str
    weight_key: str
    weighting: Weighting
    max_norm: float | None = None
    undecided: Collection[str] = ()
    noise: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start, self.is_tie = self.server.start_point(), False
        self.extras = tuple(zero_extras(self.server.algorithm.client, self.start[:0]))

    def read(self, reply: Message) -> ClientUpdate:
        """Return the update of a reply; raise `UsageError` for one that must not be used."""
        content = reply_content(reply)
        require(not self.is_tie, TIE)
        info = _reply_info(content)
        self._check_noise(info)
        metrics = reply_metrics(content)
        weight = 1.0 if self.weighting == "uniform" else client_weight(metrics, self.weight_key)
        arrays, _ = self._model(content)
        delta, extras = self.server.contribution(arrays, self.start)
        extras |= {name: self._extra(content, name) for name in self.extras}
        if not usable(delta[None], {name: value[None] for name, value in extras.items()}):
            raise DivergedReplyError(f"its values are not finite ({_first_nonfinite(arrays)})")
        norm = norms(delta[None]).item()
        if self.max_norm is not None and norm > self.max_norm:
            raise DivergedReplyError(
                f"the norm of its update is {norm:.3g}, more than max_norm={self.max_norm:g}"
            )
        shares = {}
        for name, value in {"update": delta, **extras}.items():
            length = norms(value[None]).item()
            text = f"the norm of its {name} is {length:.1e}: its training has diverged"
            require(length < largest_norm(delta.dtype), text, DivergedReplyError)
            shares[name] = weight * length
            fits = shares[name] < LARGEST_SHARE
            require(fits, f"its weight {weight:.1e} times the norm of its {name} is too large")
        for name in self.server.layout.averaged:
            impossible = name.endswith("running_var") and bool((arrays[name] < 0).any())
            require(not impossible, f"{name!r} has negative variances")
        rule = info.get("rule")
        return ClientUpdate(delta, weight, extras, metrics, norm, shares, rule and str(rule))

    def resolve_layout(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield all replies, after the first usable ones have decided the layout by majority.

        A majority, so that no single client can decide it: after a tie no reply is usable. Yields
        at once where it is decided.
        """
        source, waiting = iter(replies), list[Message]()
        votes: Counter[Layout] = Counter()
        for reply in islice(source, 2 * LAYOUT_VOTES if self.undecided else 0):
            waiting.append(reply)
            votes.update(self._vote(reply))
            if votes.total() >= LAYOUT_VOTES and _majority(votes) is not None:
                break
        layout = _majority(votes)
        self.is_tie = bool(votes) and layout is None
        if layout is not None:
            if layout != self.server.layout:
                self.server.lay_out(layout)
                self.start = self.server.start_point()
            self.undecided = ()
        while waiting:
            yield waiting.pop(0)
        yield from source

    def _check_noise(self, info: Mapping[str, Any]) -> None:
        """Refuse an update that its client has not noised as the server's epsilon assumes."""
        for name, value in self.noise.items():
            reported = info.get(name)
            require(
                isinstance(reported, int | float) and math.isclose(reported, value, rel_tol=1e-9),
                f"its {name} is {reported} instead of {value:g}, so it is not private as promised; "
                "add mods=[local_privacy(...)] to its ClientApp, with the server's settings",
            )

    def _vote(self, reply: Message) -> list[Layout]:
        """Return the layout that a usable reply has; [] for one that is not usable."""
        try:
            arrays, layout = self._model(reply_content(reply))
        except UsageError:
            return []
        return [layout] if all(np.isfinite(value).all() for value in arrays.values()) else []

    def _model(self, content: RecordDict) -> tuple[Arrays, Layout]:
        """Return the arrays of a reply, and the layout that they have."""
        arrays = loaded(only_record(content.array_records, "model", self.arrays_key)[1])
        layout = self._layout(content, arrays)
        misfit = layout.misfit(arrays)
        require(misfit is None, str(misfit))
        return arrays, layout

    def _layout(self, content: RecordDict, arrays: Arrays) -> Layout:
        """Return the layout of a reply's model.

        A client that reports its layout has that one; any other the server's, without the ties
        that its training broke while ties are undecided.
        """
        layout, info = self.server.layout, _reply_info(content)
        if "buffers" in info:
            buffers = info["buffers"] if isinstance(info["buffers"], list) else []
            if self.undecided and "buffers" not in self.undecided:
                buffers = list(layout.averaged)
            try:
                reported = layout.with_kinds(list(map(str, buffers)), read_ties(info, "") or {})
            except UsageError as error:
                raise UsageError(f"its report of the model's layout is wrong: {error}") from None
            require(
                bool(self.undecided) or reported == layout,
                "it reports other buffers or tied weights than the strategy has; give the "
                "strategy model=",
            )
            return reported
        if not self.undecided or not {*layout.tied, *layout.tied.values()} <= arrays.keys():
            return layout
        broken = layout.broken_ties(arrays)
        tied = {name: source for name, source in layout.tied.items() if name not in broken}
        return layout.with_kinds(layout.averaged, tied)

    def _extra(self, content: RecordDict, name: str) -> Tensor:
        """Return a vector that the client rule adds; the server step needs it from every client."""
        rule = type(self.server.algorithm.client).__name__
        extras = loaded(content.array_records.get(EXTRAS, ArrayRecord()))
        require(
            name in extras,
            f"it has no {name!r} in {EXTRAS!r}, which {rule} needs; use fedexp.flower.LocalRule in "
            "the ClientApp",
        )
        vector = extras[name]
        require(
            vector.shape == self.start.shape and vector.dtype.kind == "f",
            f"its {name!r} is not a vector of {len(self.start)} numbers",
        )
        return to_vector(vector, self.start.dtype)


def _majority(votes: Counter[Layout]) -> Layout | None:
    """Return the layout with the most votes; None where there are none, or for a tie."""
    (layout, most), (_, second) = [*votes.most_common(2), (None, 0), (None, 0)][:2]
    return layout if most > second else None


def _reply_info(content: RecordDict) -> Mapping[str, Any]:
    """Return the rule and layout that a reply reports; {} for that of a plain ClientApp."""
    return dict(content.config_records.get(REPLY_INFO, ConfigRecord()))


def _first_nonfinite(arrays: Arrays) -> str:
    """Return the name of the first array with a value that is not finite."""
    for name, value in arrays.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return f"{name!r}"
    return "the norm of its update"
