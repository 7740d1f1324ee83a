"""The parts of an evaluation: sets of examples, their weights in a mean, and sums that add.

An evaluation is a sum over examples, `Totals`, so that processes can share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedexp.data.federation import Batch
from fedexp.errors import UsageError, require
from fedexp.objective import map_tensors
from fedexp.objective.base import flatten, pieces
from fedexp.objective.losses import BATCH_ROWS, picked
from fedexp.precision import widest
from fedexp.tasks.metrics import Metric, add_batch, add_totals

Share = tuple[int, int]
# Examples per batch. On more, activations of a convolutional network do not fit a CPU's cache. A
# GPU takes as many as have so many numbers, within bounds.
EVALUATION_ROWS, EVALUATED_NUMBERS, FEWEST, MOST = 512, 2**24, 512, 8192
WORST = 10  # the worst decile is one client in so many
ALL_CLIENTS = -1  # instead of a client


def bounded_accuracy(name: str, value: Tensor) -> Tensor:
    """Return a mean; an accuracy of fractions of examples is not rounded to more than 1."""
    if not name.endswith("_accuracy"):
        return value
    return value.masked_fill((value > 1) & (value < 1 + 1e-6), 1.0)


def exact_weights(weights: Tensor) -> Tensor:
    """Return weights [n] as a sum [n, 2], by which a mean of zeros and ones is correctly rounded.

    The first column has multiples of the precision, whose sums up to 1 are exact; the second has
    the rest of 1 / D, where the weight of every example is 1 / D for a whole number D. Other
    weights, of examples of which a fraction counts, are returned as they are.

    >>> weights = torch.full((100,), 0.01, dtype=torch.float64)
    >>> right = (torch.arange(100) < 80).double()
    >>> (right @ weights).item() == 0.8, (right @ exact_weights(weights)).sum().item() == 0.8
    (False, True)
    """
    eps, counts = torch.finfo(weights.dtype).eps, (1 / weights).round()
    if not bool(((weights * counts - 1).abs() <= 2 * eps).all()):
        return weights
    multiples = (weights / eps).round()
    return torch.stack([multiples, (1 / eps - multiples * counts) / counts], dim=1) * eps


def weights_of_clients(offsets: NDArray[np.int64], parts: Tensor) -> Tensor:
    """Return the weights of examples of which a part counts, where all clients count alike."""
    totals, sizes = sums_by_client(parts, offsets), torch.from_numpy(np.diff(offsets))
    return (1 / (len(sizes) * totals)).repeat_interleave(sizes)


def equal_weights(weight: float, parts: Tensor) -> Tensor:
    """Return the same weight for every example, whatever part of it counts."""
    return torch.full(parts.shape, weight, dtype=torch.float64)


def weights_of_examples(parts: Tensor) -> Tensor:
    """Return one weight for all examples: 1 over the sum of the parts that count."""
    total = parts.sum(dtype=widest(parts.device)).item()
    require(total > 0, "no test example counts; change the labels, the class weights or `counted`")
    return equal_weights(1 / total, parts)


def sums_by_client(parts: Tensor, offsets: NDArray[np.int64]) -> Tensor:
    """Return the sum of the parts that count of each client, [clients]; refuse sums of zero."""
    sums = np.add.reduceat(parts.cpu().numpy().astype(np.float64), offsets[:-1].astype(np.int64))
    empty = np.flatnonzero(sums <= 0)
    if len(empty):
        raise UsageError(
            f"no example of client {empty[0]} counts: all its targets are ignored, or have the "
            "weight 0; leave such clients out, or change the class weights or the function "
            "`counted` of the task"
        )
    return torch.from_numpy(sums)


class Split(NamedTuple):
    """A set of examples to evaluate.

    Attributes:
        name: "train" or "test".
        fields: the examples.
        weights: returns the weight of each example in the means, given the parts that count.
        offsets: of the clients' examples; None where they belong to none.
        metrics: to compute.
        metrics_by_client: for each client, instead of for all examples.
    """

    name: str
    fields: Batch
    weights: Callable[[Tensor], Tensor]
    offsets: NDArray[np.int64] | None
    metrics: Mapping[str, Metric]
    metrics_by_client: bool = False

    @property
    def clients(self) -> int:
        return 0 if self.offsets is None else len(self.offsets) - 1

    def owners(self) -> Tensor | None:
        """Return the client of each example, if any."""
        if self.offsets is None:
            return None
        sizes = torch.from_numpy(np.diff(self.offsets))
        return torch.arange(self.clients).repeat_interleave(sizes)

    def pieces(self, per_example: bool, device: str, share: Share) -> Iterator[slice]:
        """Yield the rows that are evaluated together, of the k-th of n parts.

        Where the loss is one number for them, they belong to one client, and do not depend on the
        device or on n. The loss of a split is then the mean over pieces, weighted by their rows.
        """
        part, parts = share
        if per_example:
            together = EVALUATION_ROWS
            if device == "cuda":
                numbers = sum(value[:1].numel() for value in self.fields.values())
                together = min(MOST, max(FEWEST, EVALUATED_NUMBERS // numbers))
            first, last = (rows_of(self.fields) * end // parts for end in (part, part + 1))
            for start in range(first, last, together):
                yield slice(start, min(start + together, last))
            return
        ends = [0, rows_of(self.fields)] if self.offsets is None else self.offsets.tolist()
        cut = [
            slice(start, min(start + BATCH_ROWS, end))
            for begin, end in pairwise(ends)
            for start in range(begin, end, BATCH_ROWS)
        ]
        yield from cut[len(cut) * part // parts : len(cut) * (part + 1) // parts]

    def clients_of(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """Yield the clients of some rows, with their places among these rows."""
        assert self.offsets is not None
        client = int(np.searchsorted(self.offsets, rows.start, side="right")) - 1
        start = rows.start
        while start < rows.stop:
            end = min(rows.stop, int(self.offsets[client + 1]))
            yield client, slice(start - rows.start, end - rows.start)
            client, start = client + 1, end


@dataclass(frozen=True)
class Totals:
    """Sums of an evaluation, by record field; they add over parts of the examples.

    Attributes:
        means: weighted sums of values, in one part or, of `exact_weights`, in two.
        clients: sums of values by client, [clients] each.
        metrics: totals of metrics, by client where they are computed for each.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    clients: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        return Totals(**add_totals(vars(self), vars(other)))

    def add_metrics(
        self, split: Split, rows: slice, outputs: Any, targets: Any, device: torch.device
    ) -> None:
        """Add the outputs of some rows to the totals of a split's metrics, in place."""
        whole = map_tensors(lambda t: t.to(device), (outputs, targets))
        sets = [(ALL_CLIENTS, whole)]
        if split.metrics_by_client:
            count = rows.stop - rows.start
            sets = [(c, picked(whole, places, count)) for c, places in split.clients_of(rows)]
        for name, metric in split.metrics.items():
            totals = self.metrics.setdefault(f"{split.name}_{name}", {})
            for client, some in sets:
                before = totals[client] if client in totals else _zero(metric, device)
                totals[client] = add_batch(name, metric, before, *some)

    def on_host(self) -> Totals:
        """Return the totals on the CPU."""
        means = list(self.means.values())
        on_cpu = pieces(flatten(means).cpu(), means)
        return Totals(
            dict(zip(self.means, on_cpu, strict=True)),
            self.clients,
            {name: _on_cpu(value) for name, value in self.metrics.items()},
        )


def add_value(sums: dict[str, Tensor], key: str, value: Tensor) -> None:
    """Add a value to sums of an evaluation, in place."""
    sums[key] = sums[key] + value if key in sums else value


def _zero(metric: Metric, device: torch.device) -> Any:
    def move(total: Tensor) -> Tensor:
        return total.to(device, widest(device) if total.dtype == torch.float64 else total.dtype)

    return map_tensors(move, metric.zero())


def _on_cpu(total: Any) -> Any:
    if isinstance(total, nn.Module):
        return total.cpu()
    if isinstance(total, tuple):
        return tuple(map(_on_cpu, total))
    if isinstance(total, dict):
        return {key: _on_cpu(value) for key, value in total.items()}
    return total.cpu() if isinstance(total, Tensor) else total


def worst_decile(values: Tensor, highest: bool) -> float:
    """Return the mean of the worst tenth of clients, rounded down, at least one.

    Args:
        values: one per client.
        highest: whether the highest values are the worst.

    >>> worst_decile(torch.arange(25.0), highest=False)
    0.5
    """
    count = max(1, len(values) // WORST)
    return values.topk(count, largest=highest).values.mean().item()


def rows_of(fields: Batch) -> int:
    return len(next(iter(fields.values())))
