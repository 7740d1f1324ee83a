"""Partitions: which client gets which example. Pure functions of their random generator.

Each returns one sorted array of example numbers a client, disjoint and never empty, which
`Federation.from_parts` takes as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedexp.errors import UsageError, require

Parts = list[NDArray[np.int64]]


def iid(examples: int, clients: int, rng: np.random.Generator) -> Parts:
    """Shuffle, and deal the examples out evenly.

    >>> sorted(len(part) for part in iid(10, 3, np.random.default_rng(0)))
    [3, 3, 4]
    """
    _check(examples, clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(examples), clients)]


def by_id(ids: ArrayLike) -> Parts:
    """One client for each different id, in the order of the ids: the natural partition.

    >>> [part.tolist() for part in by_id(["mary", "john", "mary"])]
    [[1], [0, 2]]
    """
    ids = _column("ids", ids)
    require(len(ids) > 0, "there are no ids to make clients of")
    try:
        owner = np.unique(ids, return_inverse=True)[1]
    except TypeError as error:  # nothing says whether None comes before 3
        raise UsageError("ids of different kinds have no order; make them all text") from error
    return _parts(owner, int(owner.max()) + 1)


def shards(
    labels: ArrayLike, clients: int, shards_per_client: int, rng: np.random.Generator
) -> Parts:
    """Sort by label, cut into shards, and deal each client a few of them (McMahan et al., 2017).

    With 2 shards a client, most clients see examples of two classes only. Shards are of equal
    size, or differ by one example where the division leaves a rest; all examples are dealt out.

    Args:
        labels: the class of each example.
        clients: number of clients.
        shards_per_client: shards that each client gets, at least 1.
        rng: shuffles the examples within their class, and the shards.

    >>> parts = shards([0, 1, 0, 1, 0, 1], 2, 1, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2, 4], [1, 3, 5]]
    """
    labels = _column("labels", labels)
    require(shards_per_client >= 1, f"shards_per_client must be at least 1: {shards_per_client}")
    _check(len(labels), clients, shards_per_client)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    cut = np.array_split(by_class, clients * shards_per_client)
    dealt = rng.permutation(len(cut)).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([cut[shard] for shard in hand])) for hand in dealt]


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
    labels = _column("labels", labels)
    _check(len(labels), clients)
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    mix = _mixes(alpha, clients, len(pools), rng)
    size = len(labels) // clients
    owner = rng.permutation(np.repeat(np.arange(clients), size))
    drawn = _draw_classes(owner, mix, np.array([len(pool) for pool in pools]), rng)
    example = np.empty(len(owner), dtype=np.int64)
    for c, pool in enumerate(pools):
        places = np.flatnonzero(drawn == c)
        example[places] = pool[: len(places)]
    return [np.sort(example[places]) for places in _parts(owner, clients)]


def dirichlet_unequal(
    labels: ArrayLike, clients: int, alpha: float, rng: np.random.Generator, minimum: int = 1
) -> Parts:
    """Each class is split over the clients by Dirichlet(alpha) proportions; sizes follow.

    All examples are dealt out. Clients that are left with fewer than `minimum` get the rest from
    the others' surplus, drawn at random, so one pass always suffices (drawing all proportions
    again until every client has enough, as is common, may never end).

    >>> parts = dirichlet_unequal([0, 1] * 50, 4, 0.1, np.random.default_rng(0), minimum=5)
    >>> sum(map(len, parts)), min(map(len, parts)) >= 5
    (100, True)
    """
    labels = _column("labels", labels)
    require(minimum >= 1, f"minimum must be at least 1, not {minimum}")
    _check(len(labels), clients, minimum)
    classes = np.unique(labels)
    owner = np.empty(len(labels), dtype=np.int64)
    for c, mix in zip(classes, _mixes(alpha, len(classes), clients, rng), strict=True):
        pool = rng.permutation(np.flatnonzero(labels == c))
        ends = np.rint(np.cumsum(mix) / mix.sum() * len(pool)).astype(np.int64)
        owner[pool] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    return _parts(_topped_up(owner, clients, minimum, rng), clients)


def _topped_up(
    owner: NDArray[np.int64], clients: int, minimum: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The owners after clients below the minimum got what they lack from the others' surplus."""
    shuffled = rng.permutation(len(owner))
    surplus = [part[minimum:] for part in _parts(owner[shuffled], clients)]
    spare = rng.permutation(shuffled[np.concatenate(surplus)])
    lacking = np.maximum(minimum - np.bincount(owner, minlength=clients), 0)
    owner = owner.copy()
    owner[spare[: lacking.sum()]] = np.repeat(np.arange(clients), lacking)
    return owner


def _mixes(alpha: float, rows: int, kinds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Rows of proportions from Dirichlet(alpha), for any alpha > 0.

    At the far ends the sampler may divide zero by zero or infinity by infinity, so the limits are
    written out: all of one kind for alpha to 0, an even mix for alpha to infinity.
    """
    require(alpha > 0, f"alpha must be positive, not {alpha}")
    if alpha > 1e100:
        return np.full((rows, kinds), 1 / kinds)
    mixes = rng.dirichlet(np.full(kinds, alpha), size=rows)
    broken = ~np.isclose(mixes.sum(axis=1), 1)
    mixes[broken] = np.eye(kinds)[rng.integers(kinds, size=np.count_nonzero(broken))]
    return mixes


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
    # Scaled up by a power of two, which is exact: the tiny odds of a tiny alpha would else be
    # subnormal, and a ticket drawn from them could round to no class at all.
    odds = np.ldexp(mix * (left > 0), 1000)
    nothing_left = odds.sum(axis=1) <= 0
    odds[nothing_left] = left
    return odds


def _parts(owner: NDArray[np.int64], clients: int) -> Parts:
    """The positions of each client's entries, in increasing order."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _column(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        column = np.asarray(values)
    except ValueError as error:  # numpy's word for lists of different lengths
        raise UsageError(f"{name} must be one value an example, not lists") from error
    require(column.ndim == 1, f"{name} must be one value an example, not {column.shape}")
    return column


def _check(examples: int, clients: int, each: int = 1) -> None:
    require(clients >= 1, f"need at least one client, not {clients}")
    require(
        clients * each <= examples,
        f"cannot give {clients} clients {'an example' if each == 1 else f'{each} examples'} each "
        f"out of {examples}; use fewer clients",
    )
