"""Partitions: which client gets which example. Pure functions of their random generator.

Each returns one sorted array of example indices per client, disjoint and never empty, for
`Federation.from_parts`.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedexp.errors import UsageError, require, whole_number

Parts = list[NDArray[np.int64]]


def iid(examples: int, clients: int, rng: np.random.Generator) -> Parts:
    """Shuffle the examples and split them evenly.

    >>> sorted(len(part) for part in iid(10, 3, np.random.default_rng(0)))
    [3, 3, 4]
    """
    whole_number("examples", examples, 1)
    _check(examples, clients, rng)
    return [np.sort(part) for part in np.array_split(rng.permutation(examples), clients)]


def by_id(ids: ArrayLike) -> Parts:
    """Return one client per distinct id, sorted by id: the natural partition.

    >>> [part.tolist() for part in by_id(["mary", "john", "mary"])]
    [[1], [0, 2]]
    """
    owner = _numbered("id", ids)
    require(len(owner) > 0, "there are no ids; give one per example")
    return _parts(owner, int(owner.max()) + 1)


def shards(
    labels: ArrayLike, clients: int, shards_per_client: int, rng: np.random.Generator
) -> Parts:
    """Sort by label, split into shards, and give each client a few of them (McMahan et al., 2017).

    With 2 shards per client, most clients see two classes only. Shard sizes differ by at most one
    example, and all examples are used.

    Args:
        labels: the class of each example.
        clients: number of clients.
        shards_per_client: number of shards per client, at least 1.
        rng: shuffles the examples within their class, and the shards.

    >>> parts = shards([0, 1, 0, 1, 0, 1], 2, 1, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2, 4], [1, 3, 5]]
    """
    labels = _numbered("label", labels)
    whole_number("shards_per_client", shards_per_client, 1)
    _check(len(labels), clients, rng, shards_per_client)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_class, clients * shards_per_client)
    assigned = rng.permutation(len(pieces)).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([pieces[i] for i in chosen])) for chosen in assigned]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """Make clients of equal size whose class proportions are drawn from Dirichlet(alpha).

    The smaller alpha, the fewer classes a client sees. Each slot of a client draws a class from the
    client's proportions; if the class is exhausted, the slot draws again among the remaining
    classes. Each such pass exhausts a class, so there are at most as many passes as classes (the
    released code's loop may not terminate, docs/paper.md#released-partition).

    Each client has examples // clients examples; the remainder is unused.

    >>> parts = dirichlet([0, 1] * 50, 4, 0.1, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [25, 25, 25, 25]
    """
    labels = _numbered("label", labels)
    _check(len(labels), clients, rng)
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    mix = _proportions(alpha, clients, len(pools), rng)
    size = len(labels) // clients
    owner = rng.permutation(np.repeat(np.arange(clients), size))
    drawn = draw_classes(owner, mix, np.array([len(pool) for pool in pools]), rng)
    example = np.empty(len(owner), dtype=np.int64)
    for c, pool in enumerate(pools):
        slots = np.flatnonzero(drawn == c)
        example[slots] = pool[: len(slots)]
    return [np.sort(example[slots]) for slots in _parts(owner, clients)]


def dirichlet_unequal(
    labels: ArrayLike, clients: int, alpha: float, rng: np.random.Generator, minimum: int = 1
) -> Parts:
    """Split each class over the clients by Dirichlet(alpha) proportions; client sizes vary.

    All examples are used. Clients with fewer than `minimum` examples are topped up at random from
    the surplus of larger clients in one pass (the common way, drawing all proportions again until
    every client has enough, may not terminate).

    >>> parts = dirichlet_unequal([0, 1] * 50, 4, 0.1, np.random.default_rng(0), minimum=5)
    >>> sum(map(len, parts)), min(map(len, parts)) >= 5
    (100, True)
    """
    labels = _numbered("label", labels)
    whole_number("minimum", minimum, 1)
    _check(len(labels), clients, rng, minimum)
    classes = np.unique(labels)
    owner = np.empty(len(labels), dtype=np.int64)
    for c, mix in zip(classes, _proportions(alpha, len(classes), clients, rng), strict=True):
        pool = rng.permutation(np.flatnonzero(labels == c))
        ends = np.rint(np.cumsum(mix) / mix.sum() * len(pool)).astype(np.int64)
        owner[pool] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    return _parts(_top_up(owner, clients, minimum, rng), clients)


def _top_up(
    owner: NDArray[np.int64], clients: int, minimum: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the owners after moving surplus examples to clients below the minimum."""
    shuffled = rng.permutation(len(owner))
    surplus = [part[minimum:] for part in _parts(owner[shuffled], clients)]
    spare = rng.permutation(shuffled[np.concatenate(surplus)])
    lacking = np.maximum(minimum - np.bincount(owner, minlength=clients), 0)
    owner = owner.copy()
    owner[spare[: lacking.sum()]] = np.repeat(np.arange(clients), lacking)
    return owner


def _proportions(
    alpha: float, rows: int, columns: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw rows of proportions from Dirichlet(alpha), for any alpha > 0.

    For extreme alpha the sampler computes 0/0 or inf/inf, so the limits are explicit: one-hot rows
    for alpha to 0, uniform rows for alpha to infinity.
    """
    valid = isinstance(alpha, Real) and alpha > 0
    require(valid, f"alpha must be positive, not {alpha!r}")
    if alpha > 1e100:
        return np.full((rows, columns), 1 / columns)
    drawn = rng.dirichlet(np.full(columns, alpha), size=rows)
    broken = ~np.isclose(drawn.sum(axis=1), 1)
    drawn[broken] = np.eye(columns)[rng.integers(columns, size=np.count_nonzero(broken))]
    return drawn


def draw_classes(
    owner: NDArray[np.int64],
    mix: NDArray[np.float64],
    left: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Draw a class for each slot, no class more often than it has examples left."""
    drawn = np.full(len(owner), -1)
    while (undecided := np.flatnonzero(drawn < 0)).size:
        odds = _remaining_odds(mix, left)
        cumulative = np.cumsum(odds, axis=1)[owner[undecided]]
        uniform = rng.random(len(undecided)) * cumulative[:, -1]
        choice = (uniform[:, None] >= cumulative).sum(axis=1)
        for c in range(len(left)):
            granted = undecided[choice == c][: left[c]]
            drawn[granted] = c
            left[c] -= len(granted)
    return drawn


def _remaining_odds(mix: NDArray[np.float64], left: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return odds among the remaining classes; a client that has none of them takes any."""
    # Scaled by a power of two, which is exact: the odds of a tiny alpha would otherwise be
    # subnormal, and a draw from them could round to no class at all.
    odds = np.ldexp(mix * (left > 0), 1000)
    exhausted = odds.sum(axis=1) <= 0
    odds[exhausted] = left
    return odds


def _parts(owner: NDArray[np.int64], clients: int) -> Parts:
    """Return the indices that each client owns, in increasing order."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _numbered(kind: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return the rank of each id or label among the distinct ones.

    Refuse values that are not one per example, have no order, or are missing (NaN or None), of
    which numpy would make a client or class.
    """
    try:
        column = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise UsageError(f"{kind}s must be one value per example, not lists") from error
    require(column.ndim == 1, f"{kind}s must be one value per example, not {column.shape}")
    # of a list, numpy makes NaN and None among texts the texts "nan" and "None"
    listed: Any = values if column.dtype.kind in "US" else column
    missing = (
        [] if column.dtype.kind in "biu" else [value for value in listed if _is_missing(value)]
    )
    if missing:
        what = "None" if any(value is None for value in missing) else "NaN"
        if len(missing) == 1:
            raise UsageError(f"1 {kind} is {what}; drop this row")
        raise UsageError(f"{len(missing)} {kind}s are {what}; drop these rows")
    try:
        return np.unique(column, return_inverse=True)[1]
    except TypeError as error:  # e.g. 3 and "a"
        raise UsageError(f"{kind}s of different kinds have no order; make them all text") from error


def _is_missing(id: Any) -> bool:
    """Return whether an id is None, or NaN in any of its kinds."""
    try:
        return id is None or bool(id != id)
    except TypeError:  # pandas.NA
        return True


def _check(examples: int, clients: int, rng: Any, per_client: int = 1) -> None:
    whole_number("clients", clients, 1)
    count = "an example" if per_client == 1 else f"{per_client} examples"
    require(
        isinstance(rng, np.random.Generator),
        f"rng is {type(rng).__name__}; give numpy.random.default_rng(0)",
    )
    require(
        clients * per_client <= examples,
        f"cannot give each of {clients} clients {count} out of {examples}; use fewer clients",
    )
