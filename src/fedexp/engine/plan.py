"""The plan of a round: which clients, and which batches each of them sees.

Pure functions of (seed, round, client), so every engine trains on the same examples.

`Work`: what one round asks of an engine, and the batches that every engine must use.

The batches of many clients side by side: what the batched engine works through.

Only numbers, sizes and places of the clients are planned here; which rows a step sees is worked out
on the device, so that a GPU waits for nothing.

The batches of many clients side by side, worked out by numpy: what suits a CPU.

The same rows as `plan.plan_batches` gives client by client. Numbers are sorted with their places in
their low bits, which takes a fifth of the time of a stable sort, and no two of them are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.data.federation import Batch
from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.seeding import generator, hashed, torch_seed
from fedexp.tasks.task import Task, Weighting

EPOCH_BITS = 20  # a sort key has so many bits for the epoch, and 43 for chance


def sample_cohort(seed: int, round: int, clients: int, cohort: int | None) -> NDArray[np.int64]:
    """The clients of a round, in increasing order; all of them when `cohort` is None.

    >>> sample_cohort(seed=0, round=1, clients=4, cohort=None).tolist()
    [0, 1, 2, 3]
    """
    if cohort is None or cohort == clients:
        return np.arange(clients)
    require(cohort >= 1, f"the cohort must be at least 1, not {cohort}")
    require(
        cohort <= clients,
        f"the cohort of {cohort} is larger than the federation of {clients} clients",
    )
    chosen = generator(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(chosen)


def plan_batches(
    seed: int, round: int, client: int, size: int, local: LocalTraining
) -> list[NDArray[np.int64]]:
    """The examples of each local step, by their position among the client's own.

    The client goes through its data in shuffled epochs until the steps are done; the last batch of
    an epoch may be smaller. This is what a shuffling loader that is restarted gives (audit B19).

    >>> [len(b) for b in plan_batches(0, 1, 0, size=5, local=LocalTraining(steps=4, batch_size=2))]
    [2, 2, 1, 2]
    """
    steps, batch = local.steps_for(size), local.batch_size
    if batch is None:
        return [np.arange(size)] * steps
    key = torch.tensor(batch_key(seed, round))
    one, own = torch.tensor([client]), torch.tensor([size])
    epochs = math.ceil(steps / math.ceil(size / batch))
    orders = shuffled(key, one, own, epochs * size).view(epochs, size).numpy()
    planned = [order[at : at + batch] for order in orders for at in range(0, size, batch)]
    return planned[:steps]


@lru_cache(maxsize=4)
def batch_key(seed: int, round: int) -> int:
    """What the batches of a round follow from, beside the client."""
    return torch_seed(seed, "batches", round)


def shuffled(key: Tensor, clients: Tensor, sizes: Tensor, length: int) -> Tensor:
    """The examples of K clients, epoch after epoch, each epoch in an order of its own, [K, length].

    Integer arithmetic only, so every device gives the same. Epochs that `length` cuts off are not
    shuffled fairly: ask for all of what is used.
    """
    epoch = torch.arange(length, device=clients.device) // sizes[:, None]
    lottery = hashed(key, clients, length) >> EPOCH_BITS
    order = torch.sort((epoch << (63 - EPOCH_BITS)) + lottery, dim=1, stable=True).indices
    return order - epoch * sizes[:, None]


def step_lengths(sizes: NDArray[np.int64], local: LocalTraining) -> NDArray[np.int64]:
    """How many examples each step of each client sees, [S, K]; 0 where it has no more steps.

    >>> step_lengths(np.array([5, 2]), LocalTraining(epochs=1, batch_size=2)).T.tolist()
    [[2, 2, 1], [2, 0, 0]]
    """
    batch = sizes if local.batch_size is None else np.full_like(sizes, local.batch_size)
    per_epoch = -(-sizes // batch)
    steps = np.full_like(sizes, local.steps)
    if local.epochs is not None:
        steps = local.epochs * per_epoch
    step = np.arange(steps.max())[:, None]
    left = sizes - step % per_epoch * batch
    lengths: NDArray[np.int64] = np.where(step < steps, np.minimum(batch, left), 0)
    return lengths


def step_rows(
    key: Tensor, who: Tensor, steps: int, width: int, length: int, batch_size: int | None
) -> Tensor:
    """The rows of a federation that K clients see, [S, K, width], on the device of `who`.

    `who` has the clients' numbers, sizes and first rows, [3, K]; `length` is as far as any of them
    reaches into its epochs. What fills up a short batch is the client's first row.
    """
    clients, sizes, first = who
    place = torch.arange(width, device=who.device)
    if batch_size is None:
        inside = torch.where(place < sizes[:, None], place, 0)
        return (first[:, None] + inside).expand(steps, -1, -1)
    order = shuffled(key, clients, sizes, length)
    step = torch.arange(steps, device=who.device)[:, None]
    per_epoch = (sizes + (batch_size - 1)) // batch_size
    at = (step % per_epoch * batch_size)[:, :, None] + place
    reached = (step // per_epoch * sizes)[:, :, None] + at
    short = at >= sizes[:, None]
    picked = order.gather(1, reached.clamp(max=length - 1).movedim(1, 0).flatten(1))
    picked = picked.view(len(clients), steps, width).movedim(1, 0)
    return first[:, None] + torch.where(short, 0, picked)


@dataclass(frozen=True, eq=False)
class Work:
    """What one round asks of an engine."""

    task: Task
    algorithm: Algorithm
    local: LocalTraining
    weighting: Weighting
    seed: int
    round: int
    cohort: NDArray[np.int64]

    @property
    def lr(self) -> float:
        return self.local.lr_at(self.round)

    def weight(self, client: int) -> float:
        return float(self.task.train.sizes[client]) if self.weighting == "size" else 1.0

    @property
    def total_weight(self) -> float:
        """Of all clients there are."""
        train = self.task.train
        return float(train.offsets[-1] if self.weighting == "size" else train.clients)

    def after(self) -> Work:
        """The work of the next round, whose cohort is as large."""
        number = self.round + 1
        cohort = sample_cohort(self.seed, number, self.task.train.clients, len(self.cohort))
        return replace(self, round=number, cohort=cohort)

    def batches(self, client: int) -> Iterator[Batch]:
        """The batches of a client, step by step."""
        train, size = self.task.train, int(self.task.train.sizes[client])
        if self.local.batch_size is None and self.task.transform is None:
            whole = train.client(client)
            yield from (whole for _ in range(self.local.steps_for(size)))
            return
        rng = self.augmentation(client)
        for rows in plan_batches(self.seed, self.round, client, size, self.local):
            batch = train.batch(client, rows)
            if self.task.transform is not None:
                draws = self.task.transform.draw(rng, len(rows))
                batch = self.task.transform.train(batch, draws)
            yield batch

    def augmentation(self, client: int) -> np.random.Generator:
        """The client's random numbers for augmentation, drawn step after step."""
        return generator(self.seed, "augment", self.round, client)


@dataclass(frozen=True, eq=False)
class CohortPlan:
    """The batches of K clients over S steps.

    Attributes:
        who: numbers, sizes and first rows of the clients, [3, K].
        lengths: real examples in each batch, [S, K]; 0 where a client has no more steps.
        width: examples of a padded batch.
        reach: examples that any client goes through at most, epoch after epoch.
        draws: random numbers of the transform, [S, K, width, ...], or None.
    """

    who: NDArray[np.int64]
    lengths: NDArray[np.int64]
    width: int
    reach: int
    draws: NDArray[Any] | None

    @property
    def steps(self) -> NDArray[np.int64]:
        """How many steps each client takes."""
        return (self.lengths > 0).sum(axis=0)


def plan_cohort(work: Work, clients: Sequence[int]) -> CohortPlan:
    """Every client's batches: exactly those that the loop would use."""
    offsets, local, chosen = work.task.train.offsets, work.local, np.asarray(clients)
    sizes = offsets[chosen + 1] - offsets[chosen]
    lengths = step_lengths(sizes, local)
    largest, batch = int(sizes.max()), local.batch_size
    width = min(batch or largest, largest)
    # on a GPU the same for every cohort, so that a captured program fits the next one as well
    farthest = work.task.train.largest if work.task.train.device.type == "cuda" else largest
    reach = farthest + len(lengths) * (batch or 0)
    who = np.stack([chosen, sizes, work.task.train.first_rows(chosen)])
    return CohortPlan(who, lengths, width, reach, _draws(work, clients, lengths, width))


def _draws(
    work: Work, clients: Sequence[int], lengths: NDArray[np.int64], widest: int
) -> NDArray[Any] | None:
    """The transform's random numbers, drawn client by client as the loop draws them."""
    transform, drawn = work.task.transform, None
    if transform is None:
        return None
    for k, client in enumerate(clients):
        mine = lengths[lengths[:, k] > 0, k]
        values = transform.draw_steps(work.augmentation(client), mine)
        if values is None:
            return None
        if drawn is None:
            drawn = np.zeros((*lengths.shape, widest, *values.shape[1:]), values.dtype)
        ends = np.cumsum(mine)
        for s, (begin, end) in enumerate(zip(ends - mine, ends, strict=True)):
            drawn[s, k, : end - begin] = values[begin:end]
    return drawn


LARGEST = 2**EPOCH_BITS  # examples of a client, so that places fit where a sort key has its epoch


class HostBatch(NamedTuple):
    """A step of the clients that still take part.

    Attributes:
        x, y: examples [K, B, ...] and labels [K, B].
        counted: what each example weighs in its client's loss, [K, B]; 0 for one that fills up.
    """

    x: Tensor
    y: Tensor
    counted: Tensor


def host_batches(work: Work, clients: NDArray[np.int64], dtype: torch.dtype) -> Iterator[HostBatch]:
    """The batches of clients that are sorted by their steps, those with most of them first.

    A client takes part while it has steps left, and a batch is as wide as its widest.
    """
    plan = plan_cohort(work, clients.tolist())
    counted = _counted(torch.from_numpy(plan.lengths), plan.width, dtype)
    rows = torch.from_numpy(host_rows(work, clients, len(counted), plan.width))
    # few bytes, so those of all steps are read at once
    labels = work.task.train.fields["y"].index_select(0, rows.flatten()).view(rows.shape)
    plain = work.task.transform is None and bool(labels.amin() >= 0)
    changes, batch = len(rows) > 1 or plan.draws is not None, None
    for step, part in enumerate(_parts(plan.lengths)):
        if batch is None or changes:
            at = step % len(rows)
            draws = None if plan.draws is None else torch.from_numpy(plan.draws[step][part])
            x, y = _examples(work, rows[at][part], labels[at][part], draws)
            batch = HostBatch(x, y, counted[step][part])
            batch = batch if plain else _known(batch)
        yield batch


def _parts(lengths: NDArray[np.int64]) -> list[Any]:
    """What each step uses of clients and of places in a batch, given the lengths [S, K]."""
    counts, widths = (lengths > 0).sum(axis=1).tolist(), lengths.max(axis=1).tolist()
    clients, widest = lengths.shape[1], max(widths)
    return [
        ... if (count, width) == (clients, widest) else (slice(count), slice(width))
        for count, width in zip(counts, widths, strict=True)
    ]


def _counted(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The weights of examples, [S, K, width], in batches of so many real ones, [S, K]."""
    real = torch.arange(width) < lengths[:, :, None]
    return real.to(dtype) / lengths.clamp(min=1)[:, :, None]


def _examples(
    work: Work, rows: Tensor, labels: Tensor, draws: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Examples and labels as the model sees them."""
    fields, transform, picked = work.task.train.fields, work.task.transform, rows.flatten()
    if transform is None:
        return fields["x"].index_select(0, picked).unflatten(0, rows.shape), labels
    batch = {n: v.index_select(0, picked).unflatten(0, rows.shape) for n, v in fields.items()}
    seen = transform.train(batch, draws)
    return seen["x"], seen["y"]


def _known(batch: HostBatch) -> HostBatch:
    """Labels below 0 count nothing, as in torch's cross entropy."""
    counts = batch.y >= 0
    return HostBatch(batch.x, batch.y.clamp(min=0), batch.counted * counts)


def host_rows(work: Work, clients: NDArray[np.int64], steps: int, width: int) -> NDArray[np.int64]:
    """Rows of the federation, [S, K, width]; what fills up a short batch is a client's first row.

    On whole batches all steps are alike, and there is one.
    """
    offsets, batch = work.task.train.offsets, work.local.batch_size
    first = offsets[clients]
    sizes = offsets[clients + 1] - first
    if batch is None:
        place = np.arange(width)
        return np.asarray(first[:, None] + np.where(place < sizes[:, None], place, 0))[None]
    rows = np.zeros((steps, len(clients), width), np.int64)
    for size in np.unique(sizes):
        alike = sizes == size
        places = _batches(work, clients[alike], int(size), steps, batch)[:, :, :width]
        rows[:, alike] = places.swapaxes(0, 1)
    rows += first[:, None]
    return rows


def _batches(
    work: Work, clients: NDArray[np.int64], size: int, steps: int, batch: int
) -> NDArray[np.int64]:
    """The places among their own of clients of one size, [K, S, batch], with 0 for none."""
    per_epoch = math.ceil(size / batch)
    epochs = math.ceil(steps / per_epoch)
    places = np.zeros((len(clients), epochs, per_epoch * batch), np.int64)
    places[:, :, :size] = _orders(work, clients, size, epochs)
    return places.reshape(len(clients), epochs * per_epoch, batch)[:, :steps]


def _orders(work: Work, clients: NDArray[np.int64], size: int, epochs: int) -> NDArray[np.int64]:
    """Every epoch's order of a client's examples, [K, E, size]."""
    key = torch.tensor(batch_key(work.seed, work.round))
    lottery = hashed(key, torch.from_numpy(clients), epochs * size).numpy() >> EPOCH_BITS
    keys = (lottery.reshape(len(clients), epochs, size) << EPOCH_BITS) + np.arange(size)
    keys.sort(axis=2)
    keys &= LARGEST - 1
    return keys
