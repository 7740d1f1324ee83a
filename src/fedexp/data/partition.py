"""Partitions: which client gets which example. Pure functions of their random generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedexp.errors import require

Parts = list[NDArray[np.int64]]


def iid(examples: int, clients: int, rng: np.random.Generator) -> Parts:
    """Shuffle, and deal the examples out evenly.

    >>> sorted(len(part) for part in iid(10, 3, np.random.default_rng(0)))
    [3, 3, 4]
    """
    _check(examples, clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(examples), clients)]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """Clients of equal size whose class mix is drawn from Dirichlet(alpha).

    The smaller alpha, the fewer classes a client sees. Every place at a client draws a class from
    the client's mix; where a class has run out, the places that drew it draw again among the
    classes that are left. Each such pass exhausts a class, so it ends after at most as many passes
    as there are classes (the authors' loop may never end, audit B16).

    Sizes are equal: examples // clients each, and the few that remain are not dealt out.

    >>> parts = dirichlet([0, 1] * 50, 4, 0.1, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [25, 25, 25, 25]
    """
    labels = np.asarray(labels)
    _check(len(labels), clients)
    require(alpha > 0, f"alpha must be positive, not {alpha}")
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    mix = rng.dirichlet(np.full(len(pools), alpha), size=clients)
    size = len(labels) // clients
    owner = rng.permutation(np.repeat(np.arange(clients), size))
    drawn = _draw_classes(owner, mix, np.array([len(pool) for pool in pools]), rng)
    example = np.empty(len(owner), dtype=np.int64)
    for c, pool in enumerate(pools):
        places = np.flatnonzero(drawn == c)
        example[places] = pool[: len(places)]
    return [np.sort(example[owner == client]) for client in range(clients)]


def _draw_classes(
    owner: NDArray[np.int64],
    mix: NDArray[np.float64],
    left: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """A class for every place, no class more often than it has examples."""
    drawn = np.full(len(owner), -1)
    while (open_places := np.flatnonzero(drawn < 0)).size:
        odds = _over_remaining(mix, left)
        cumulative = np.cumsum(odds, axis=1)[owner[open_places]]
        ticket = rng.random(len(open_places)) * cumulative[:, -1]
        choice = (ticket[:, None] >= cumulative).sum(axis=1)
        for c in range(len(left)):
            granted = open_places[choice == c][: left[c]]
            drawn[granted] = c
            left[c] -= len(granted)
    return drawn


def _over_remaining(mix: NDArray[np.float64], left: NDArray[np.int64]) -> NDArray[np.float64]:
    """Class odds among the classes that are left; a client with none of them takes any."""
    odds = mix * (left > 0)
    nothing_left = odds.sum(axis=1) <= 0
    odds[nothing_left] = left
    return odds


def _check(examples: int, clients: int) -> None:
    require(clients >= 1, f"need at least one client, not {clients}")
    require(
        clients <= examples,
        f"cannot give {clients} clients an example each out of {examples}; use fewer clients",
    )
