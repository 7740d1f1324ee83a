"""The plan of a round: which clients take part, and which examples each of their steps sees.

Everything is a pure function of (seed, round, client), so that every engine trains on the same
examples, whatever the device, the order of the cohort and the number of processes. Step lengths are
computed on the host. The shuffle is implemented twice, by numpy for a CPU and by torch for a GPU,
where the host would otherwise have to wait; both give the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.clipping import Limits
from fedexp.cohorts import Choose, Cohort
from fedexp.data.federation import Batch, Federation
from fedexp.errors import UsageError, require
from fedexp.local import LocalTraining, round_factor
from fedexp.seeding import generator, hashed, torch_seed
from fedexp.tasks.task import Task, Weighting

if TYPE_CHECKING:  # only private runs import it
    from fedexp.privacy.simulated import SimulatedPrivacy

EPOCH_BITS = 20  # of a sort key, for the epoch; the other 43 are random
Numbers = NDArray[np.int64]


def sample_cohort(seed: int, round: int, clients: int, cohort: int | None) -> Numbers:
    """Return the clients of a round, in increasing order; all of them when `cohort` is None.

    >>> sample_cohort(seed=0, round=1, clients=4, cohort=None).tolist()
    [0, 1, 2, 3]
    """
    if cohort is None or cohort == clients:
        return np.arange(clients)
    require(cohort >= 1, f"the cohort must be at least 1, not {cohort}")
    require(
        cohort <= clients,
        f"the cohort of {cohort} is larger than the federation of {clients} clients; "
        f"take {clients} at most",
    )
    chosen = generator(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(chosen)


@dataclass(frozen=True)
class CohortRule:
    """Which clients take part in a round; by default all of them.

    Attributes:
        size: clients drawn per round, without replacement; None for all.
        clients: the clients of every round, in increasing order, instead of a draw.
        choose: a function (rng, round, federation) of the user that returns the clients of a
            round, instead of a draw. `rng` depends on the seed and the round alone. It must be a
            pure function: a round's clients are also asked for ahead of it, and by every process.
    """

    size: int | None = None
    clients: tuple[int, ...] | None = None
    choose: Choose | None = None

    @classmethod
    def of(cls, cohort: Cohort | None, clients: int) -> CohortRule:
        """Return the rule for an argument `cohort`, in a federation of so many clients.

        >>> CohortRule.of(0.25, clients=10).size, CohortRule.of([3, 1], clients=10).clients
        (2, (1, 3))
        """
        if cohort is None or (isinstance(cohort, str) and cohort == "all"):
            return cls()
        if callable(cohort):
            return cls(choose=cohort)
        if isinstance(cohort, Integral) and not isinstance(cohort, bool):
            sample_cohort(0, 0, clients, int(cohort))  # raises where it does not fit
            return cls(size=int(cohort))
        if isinstance(cohort, Real) and not isinstance(cohort, bool):
            fraction = float(cohort)
            require(
                0 < fraction <= 1,
                f"the cohort is a fraction in (0, 1], a whole number or a list, not {cohort}",
            )
            return cls(size=max(1, round(fraction * clients)))
        require(
            isinstance(cohort, Sequence | np.ndarray) and not isinstance(cohort, str),
            f'the cohort is a number, a fraction, "all", a list of clients or a function, not '
            f"{cohort!r}",
        )
        return cls(clients=tuple(_checked_cohort(cohort, clients, "the cohort").tolist()))

    def sample(self, seed: int, round: int, train: Federation) -> Numbers:
        """Return the clients of a round, in increasing order."""
        if self.choose is not None:
            try:
                chosen = self.choose(generator(seed, "choose", round), round, train)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # inside the function, not for its arguments
                name = getattr(self.choose, "__name__", "the cohort")
                raise UsageError(
                    f"{name} is not a function of (rng, round, federation); take these arguments, "
                    "or call it if it returns such a function, e.g. fedexp.cohorts.cyclic(10)"
                ) from error
            return _checked_cohort(chosen, train.clients, f"the cohort of round {round}")
        if self.clients is not None:
            return np.array(self.clients)
        return sample_cohort(seed, round, train.clients, self.size)

    def most(self, clients: int, rounds: int) -> int:
        """Return how many of all clients may take part in so many rounds."""
        if self.clients is not None:
            return len(self.clients)
        per_round = clients if self.choose or self.size is None else self.size
        return min(clients, rounds * per_round)


def _checked_cohort(chosen: Any, clients: int, what: str) -> Numbers:
    """Return chosen clients as a sorted array; refuse none, doubles and numbers out of range."""
    try:
        array = np.asarray(chosen)
    except (TypeError, ValueError):
        array = np.empty(1, object)
    require(array.size > 0, f"{what} is empty; choose at least one client")
    whole = array.dtype.kind in "iu" and array.ndim == 1
    require(whole, f"{what} must be a list of client numbers, not {chosen!r}")
    numbers: Numbers = np.sort(array.astype(np.int64))
    require(
        numbers[0] >= 0 and numbers[-1] < clients,
        f"{what} has client {numbers[0] if numbers[0] < 0 else numbers[-1]}; clients are numbered "
        f"from 0 to {clients - 1}",
    )
    twice = numbers[1:][numbers[1:] == numbers[:-1]]
    require(not len(twice), f"{what} has client {twice[:1].sum()} twice; name each client once")
    return numbers


@dataclass(frozen=True, eq=False)
class Work:
    """The work of one round: the input of an engine.

    With `privacy` every update is clipped (and noised) before it is summed, by `sum_trained` and
    `sum_updates`, and the sums are noised before the server step.

    Attributes:
        cohort_rule: chooses the cohorts of later rounds; None for cohorts of the same size.
        rounds: of the whole run, for schedules that depend on it; None where it is not known.
        limits: what clients are clipped to (`fedexp.clipping`); None where they are not.
        only: the client whose update alone has a weight in the sums, for a check of an engine.
    """

    task: Task
    algorithm: Algorithm
    local: LocalTraining
    weighting: Weighting
    seed: int
    round: int
    cohort: Numbers
    cohort_rule: CohortRule | None = None
    rounds: int | None = None
    privacy: SimulatedPrivacy | None = None
    limits: Limits | None = None
    only: int | None = None

    @property
    def lr(self) -> float:
        return self.local.lr_at(self.round, self.rounds)

    @property
    def server_factor(self) -> float:
        """The factor of the server schedule in the round."""
        schedule = self.algorithm.server_schedule
        return round_factor(schedule, "server_schedule", self.round, self.rounds)

    def step_factors(self, size: int) -> list[float]:
        """Return the factor on `lr` in each step of a client with `size` examples."""
        return self.local.step_factors(self.local.steps_for(size), self.round, self.rounds)

    def init_client_state(self, params: Tensor) -> dict[str, Tensor]:
        """Return a client's state before its first round."""
        return self.algorithm.init_client_state(params, self.local)

    def weight(self, client: int) -> float:
        if self.only is not None:
            return float(client == self.only)
        return float(self.task.train.sizes[client]) if self.weighting == "size" else 1.0

    @property
    def total_weight(self) -> float:
        """The weight of all clients, in the cohort or not."""
        train = self.task.train
        return float(train.offsets[-1] if self.weighting == "size" else train.clients)

    def after(self) -> Work:
        """Return the work of the next round; its cohort is empty after the last one, if chosen."""
        number, rule = self.round + 1, self.cohort_rule or CohortRule(len(self.cohort))
        if rule.choose is not None and number > (self.rounds or number):
            return replace(self, round=number, cohort=self.cohort[:0])
        cohort = rule.sample(self.seed, number, self.task.train)
        return replace(self, round=number, cohort=cohort)

    def is_same_round(self, other: Work) -> bool:
        """Return whether both have the same plan: examples, local training, seed and round."""
        return (
            self.task.train is other.task.train
            and self.task.transform is other.task.transform
            and self.local == other.local
            and (self.seed, self.round) == (other.seed, other.round)
        )

    def batches(self, client: int) -> Iterator[Batch]:
        """Yield the batches of a client, step by step."""
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
        """Return the client's generator for augmentation, from which steps draw in their order."""
        return generator(self.seed, "augment", self.round, client)


def client_steps(sizes: Numbers, local: LocalTraining) -> Numbers:
    """Return how many steps clients of these sizes take, [K]."""
    return np.array(list(map(local.steps_for, sizes.tolist())))


def step_lengths(sizes: Numbers, local: LocalTraining) -> Numbers:
    """Return how many examples each step of each client sees, [S, K]; 0 after its last step.

    >>> step_lengths(np.array([5, 2]), LocalTraining(epochs=1, batch_size=2)).T.tolist()
    [[2, 2, 1], [2, 0, 0]]
    """
    batch = sizes if local.batch_size is None else np.full_like(sizes, local.batch_size)
    steps = client_steps(sizes, local)
    step = np.arange(steps.max())[:, None]
    left = sizes - step % -(-sizes // batch) * batch  # in the epoch
    lengths: Numbers = np.where(step < steps, np.minimum(batch, left), 0)
    return lengths


@lru_cache(maxsize=4)
def batch_key(seed: int, round: int) -> int:
    """Return the key of a round's shuffles; with the client's number it determines them."""
    return torch_seed(seed, "batches", round)


def plan_batches(
    seed: int, round: int, client: int, size: int, local: LocalTraining
) -> list[Numbers]:
    """Return the examples of each local step, by their position among the client's examples.

    The client passes over its data in shuffled epochs until the steps are done; the last batch of
    an epoch may be smaller. This is what a restarted shuffling loader gives
    (docs/paper.md#released-batches).

    >>> [len(b) for b in plan_batches(0, 1, 0, size=5, local=LocalTraining(steps=4, batch_size=2))]
    [2, 2, 1, 2]
    """
    lengths = step_lengths(np.array([size]), local)[:, 0].tolist()
    who, width = np.array([[client], [size], [0]]), lengths[0]
    rows = host_rows(batch_key(seed, round), who, len(lengths), width, local.batch_size)[:, 0]
    if local.batch_size is None:
        return [rows[0]] * len(lengths)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def host_rows(key: int, who: Numbers, steps: int, width: int, batch_size: int | None) -> Numbers:
    """Return the rows that K clients see, [S, K, width], computed by numpy.

    On whole batches all steps are alike, and S is 1.

    Args:
        key: of the round.
        who: numbers, sizes and first rows of the clients, [3, K].
        steps: S.
        width: examples of a padded batch; padding repeats its first example.
        batch_size: of local training; None for whole batches.
    """
    clients, sizes, first = who
    if batch_size is None:
        place = np.arange(width)
        return np.asarray(first[:, None] + np.where(place < sizes[:, None], place, 0))[None]
    rows = np.zeros((steps, len(clients), width), np.int64)
    for size in np.unique(sizes).tolist():
        alike, epochs = sizes == size, math.ceil(steps / math.ceil(size / batch_size))
        who_alike = torch.from_numpy(clients[alike])
        random = hashed(torch.tensor(key), who_alike, epochs * size).numpy()
        positions = _shuffled_batches(random, size, steps, batch_size)
        rows[:, alike] = positions[:, :, :1].swapaxes(0, 1)
        rows[:, alike, : positions.shape[2]] = positions.swapaxes(0, 1)
    rows += first[:, None]
    return rows


def _shuffled_batches(random: Numbers, size: int, steps: int, batch: int) -> Numbers:
    """Return the positions of each step's examples for clients of one size, [K, S, B].

    B is the batch size, or the client's size where that is smaller. A short batch ends in copies of
    its first example: an operation over the batch, such as a maximum, gives the same with them.
    `random` [K, E * size] decides the order in each of E epochs, one number per example.
    """
    clients, batch = len(random), min(batch, size)
    random = random.reshape(clients, -1, size) >> EPOCH_BITS
    if size <= 2**EPOCH_BITS:
        # positions in the low bits: a fifth of the time of a stable sort, and no two keys are equal
        orders = (random << EPOCH_BITS) + np.arange(size)
        orders.sort(axis=2)
        orders &= 2**EPOCH_BITS - 1
    else:
        orders = np.argsort(random, axis=2, kind="stable")
    if size % batch:
        begin = size // batch * batch
        padding = np.repeat(orders[..., begin : begin + 1], begin + batch - size, axis=2)
        orders = np.concatenate([orders, padding], axis=2)
    return orders.reshape(clients, -1, batch)[:, :steps]


def device_rows(
    key: Tensor, who: Tensor, steps: int, width: int, reach: int, batch_size: int | None
) -> Tensor:
    """Return what `host_rows` returns, [S, K, width], computed by torch on the device of `who`.

    Integer arithmetic only, so that all devices agree, and shapes that do not depend on the
    clients' sizes, so that a CUDA graph can be replayed for another cohort. `reach` is the number
    of examples that any client passes over at most, epoch after epoch.
    """
    clients, sizes, first = who
    place = torch.arange(width, device=who.device)
    if batch_size is None:
        inside = torch.where(place < sizes[:, None], place, 0)
        return (first[:, None] + inside).expand(steps, -1, -1)
    epoch = torch.arange(reach, device=who.device) // sizes[:, None]
    random = hashed(key, clients, reach) >> EPOCH_BITS
    # stable, because two random numbers may be equal; an epoch that is cut off is not used, nor
    # are those beyond the bits of a key, which a small client has next to a very large one
    major = epoch.clamp(max=2**EPOCH_BITS - 1) << (63 - EPOCH_BITS)
    order = torch.sort(major + random, dim=1, stable=True).indices
    order = order - epoch * sizes[:, None]
    step = torch.arange(steps, device=who.device)[:, None]
    per_epoch = (sizes + (batch_size - 1)) // batch_size
    position = (step % per_epoch * batch_size)[:, :, None] + place
    reached = (step // per_epoch * sizes)[:, :, None] + position
    picked = order.gather(1, reached.clamp(max=reach - 1).movedim(1, 0).flatten(1))
    picked = picked.view(len(clients), steps, width).movedim(1, 0)
    return first[:, None] + torch.where(position >= sizes[:, None], picked[..., :1], picked)


@dataclass(frozen=True, eq=False)
class CohortPlan:
    """The batches of K clients over S steps.

    Attributes:
        who: numbers, sizes and first rows of the clients, [3, K].
        lengths: examples in each batch, [S, K]; 0 after a client's last step.
        width: examples of a padded batch.
        reach: examples that any client passes over at most, epoch after epoch.
        draws: random numbers of the transform, [S, K, width, ...], or None.
        factors: on the learning rate of each step, [S, K], or None where all are 1.
    """

    who: Numbers
    lengths: Numbers
    width: int
    reach: int
    draws: NDArray[Any] | None
    factors: NDArray[np.float64] | None = None

    @property
    def table(self) -> Numbers:
        """`who` and `lengths` in one array, [3 + S, K], for a single transfer."""
        return np.concatenate([self.who, self.lengths])

    @property
    def steps(self) -> Numbers:
        """The number of steps of each client, [K]."""
        return (self.lengths > 0).sum(axis=0)

    @property
    def total_factors(self) -> NDArray[Any]:
        """The sum of each client's step sizes over the learning rate, [K]: its steps, mostly."""
        return self.steps if self.factors is None else self.factors.sum(axis=0)


def rounded_up(steps: int) -> int:
    """Return a number of steps that many cohorts can share, at most a quarter more.

    >>> [rounded_up(steps) for steps in (3, 8, 9, 17, 33, 100)]
    [3, 8, 10, 20, 40, 112]
    """
    unit = max(1, 2 ** ((steps - 1).bit_length() - 3))
    return -(-steps // unit) * unit


def plan_cohort(work: Work, clients: Sequence[int], is_stepped: bool = False) -> CohortPlan:
    """Return the plan of some clients of a round: exactly the batches of the loop.

    On a GPU it has room for steps of other cohorts, so that a captured graph fits them as well: for
    those of any if a graph is one step (`is_stepped`), for some more if it is all steps.
    """
    train, local, chosen = work.task.train, work.local, np.asarray(clients)
    sizes = train.offsets[chosen + 1] - train.offsets[chosen]
    lengths = step_lengths(sizes, local)
    largest, batch = int(sizes.max()), local.batch_size
    width = min(batch or largest, largest)
    farthest = largest
    if train.device.type == "cuda" or is_stepped:
        farthest = train.largest
        width = min(batch or largest, farthest)
        most = int(client_steps(np.array([farthest]), local)[0])
        steps = most if is_stepped else min(most, rounded_up(len(lengths)))
        lengths = np.pad(lengths, ((0, max(0, steps - len(lengths))), (0, 0)))
    reach = farthest + len(lengths) * (batch or 0)
    who = np.stack([chosen, sizes, train.first_rows(chosen)])
    draws, factors = _draws(work, clients, lengths, width), None
    if local.has_step_schedule:
        factors = np.zeros(lengths.shape)
        for k, size in enumerate(sizes.tolist()):
            of_client = work.step_factors(size)
            factors[: len(of_client), k] = of_client
    return CohortPlan(who, lengths, width, reach, draws, factors)


def _draws(work: Work, clients: Sequence[int], lengths: Numbers, width: int) -> NDArray[Any] | None:
    """Return the transform's random numbers, drawn client by client as the loop draws them."""
    transform, drawn = work.task.transform, None
    if transform is None:
        return None
    for k, client in enumerate(clients):
        own_lengths = lengths[lengths[:, k] > 0, k]
        values = transform.draw_steps(work.augmentation(client), own_lengths)
        if values is None:
            return None
        if drawn is None:
            drawn = np.zeros((*lengths.shape, width, *values.shape[1:]), values.dtype)
        ends = np.cumsum(own_lengths)
        for s, (begin, end) in enumerate(zip(ends - own_lengths, ends, strict=True)):
            drawn[s, k, : end - begin] = values[begin:end]
    return drawn
