"""Ready-made functions for `simulate(cohort=...)`: who takes part in a round.

Each returns a function `choose(rng, round, federation)` that returns client numbers. Write your own
in the same way; it must be pure, since a round's clients are also asked for ahead of it, when a run
resumes, and by every process. `rng` is a numpy generator of the seed and the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.federation import Federation
from fedexp.errors import UsageError, first_line, require, shown, whole_number

Clients = NDArray[np.int64]
Choose = Callable[[np.random.Generator, int, Federation], Any]
Cohort = int | float | str | Sequence[int] | Clients | Choose


def weighted_by_size(size: int) -> Choose:
    """Return a function that draws clients in proportion to their examples, without replacement.

    A client with n_i of n examples takes part with probability size · n_i / n. Where that is more
    than 1 it takes part in every round, and the others share the rest in the same proportion.
    """

    def in_proportion(rng: np.random.Generator, round: int, federation: Federation) -> Clients:
        _check(size, federation)
        sizes, always = federation.sizes, np.zeros(federation.clients, dtype=bool)
        while True:
            left, total = size - int(always.sum()), int(sizes[~always].sum())
            more = ~always & (left * sizes > total)
            if not more.any():
                break
            always |= more
        # systematic sampling, in whole numbers: a client spans left * n_i, points are `total` apart
        others = rng.permutation(np.flatnonzero(~always))
        points = rng.integers(total) + total * np.arange(left)
        at = np.searchsorted(np.cumsum(left * sizes[others]), points, side="right")
        return np.concatenate([np.flatnonzero(always), others[at]])

    return in_proportion


def cyclic(size: int) -> Choose:
    """Return a function that takes the clients in turn, `size` of them per round.

    >>> import torch
    >>> federation = Federation({"x": torch.zeros(5)}, np.arange(6))
    >>> rng = np.random.default_rng(0)
    >>> [cyclic(2)(rng, round, federation).tolist() for round in (1, 2, 3)]
    [[0, 1], [2, 3], [4, 0]]
    """

    def choose(rng: np.random.Generator, round: int, federation: Federation) -> Clients:
        _check(size, federation)
        return np.arange((round - 1) * size, round * size) % federation.clients

    return choose


def available(
    probability: Callable[[int, Federation], Any] | Any, size: int | None = None
) -> Choose:
    """Return a function that draws among the clients that are available in a round.

    Cohorts differ in size. Where no client is available, one takes part nevertheless, drawn in
    proportion to the probabilities.

    Args:
        probability: that a client is available: a number for all, or one per client; or a function
            that returns them for a round, e.g. `lambda round, federation: 0.1`.
        size: clients per round at most; None for all that are available.
    """

    if size is not None:
        whole_number("size", size, 1)

    def choose(rng: np.random.Generator, round: int, federation: Federation) -> Clients:
        values: Any = probability
        if callable(probability):
            try:
                values = probability(round, federation)
            except TypeError as error:
                raise UsageError(
                    "probability does not take (round, federation), e.g. lambda round, federation: "
                    f"0.1: {first_line(error)}"
                ) from error
        odds = _probabilities(values, federation.clients)
        chosen = np.flatnonzero(rng.random(federation.clients) < odds)
        if not len(chosen):
            total = odds.sum()
            chosen = rng.choice(federation.clients, 1, p=odds / total if total else None)
        return chosen if size is None else rng.permutation(chosen)[:size]

    return choose


def _probabilities(values: Any, clients: int) -> NDArray[np.float64]:
    """Return one probability per client; refuse anything but numbers from 0 to 1."""
    try:
        odds = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        odds = np.full(1, np.nan)
    require(
        bool(((odds >= 0) & (odds <= 1)).all()),
        "probability must be from 0 to 1, a number or one per client, not "
        f"{shown(repr(values), 40)}",
    )
    require(
        odds.ndim == 0 or odds.shape == (clients,),
        f"probability has the shape {list(odds.shape)}; give a number, or one for each of the "
        f"{clients} clients",
    )
    return np.broadcast_to(odds, clients)


def _check(size: int, federation: Federation) -> None:
    whole_number("size", size, 1)
    require(
        1 <= size <= federation.clients,
        f"cannot choose {size} of {federation.clients} clients; take 1 to {federation.clients}",
    )
