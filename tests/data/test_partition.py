"""Properties that every partition has, and those of each kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedexp.data import partition
from fedexp.data.partition import Parts, by_id, dirichlet, dirichlet_unequal, iid, shards
from fedexp.errors import UsageError

UNTYPED: Any = partition  # for calls that mypy refuses
Labels = NDArray[np.int64]
ALPHAS = st.sampled_from([1e-300, 1e-6, 1e-3, 0.05, 0.3, 1.0, 100.0, 1e200, float("inf")])
RANDOM: dict[str, Callable[..., Parts]] = {
    "iid": lambda labels, clients, alpha, rng: iid(len(labels), clients, rng),
    "dirichlet": dirichlet,
    "dirichlet_unequal": dirichlet_unequal,
    "shards": lambda labels, clients, alpha, rng: shards(labels, clients, 1, rng),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Labels, int]:
    """Labels of up to six classes, and a number of clients up to that of the examples."""
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=80))
    return np.array(labels), draw(st.integers(1, len(labels)))


def balanced(examples: int, classes: int) -> Labels:
    return np.random.default_rng(0).permutation(np.arange(examples) % classes)


def classes_per_client(parts: Parts, labels: Labels) -> float:
    return float(np.mean([len(np.unique(labels[part])) for part in parts]))


def distance_from_even(parts: Parts, labels: Labels) -> float:
    """Mean total variation between the clients' class mixes and the one of all the data."""
    kinds = labels.max() + 1
    overall = np.bincount(labels, minlength=kinds) / len(labels)
    mixes = [np.bincount(labels[p], minlength=kinds) / len(p) for p in parts]
    return float(np.mean([np.abs(mix - overall).sum() / 2 for mix in mixes]))


@pytest.mark.parametrize("name", RANDOM)
@given(case=cases(), alpha=ALPHAS, seed=st.integers(0, 2**32))
def test_the_contract(name: str, case: tuple[Labels, int], alpha: float, seed: int) -> None:
    labels, clients = case
    first, second = (
        RANDOM[name](labels, clients, alpha, np.random.default_rng(seed)) for _ in range(2)
    )
    used = np.concatenate(first)
    assert len(first) == clients
    assert all(len(part) >= 1 for part in first)
    assert used.dtype == np.int64
    assert used.min() >= 0
    assert used.max() < len(labels)
    assert len(np.unique(used)) == len(used)
    assert all((np.diff(part) > 0).all() for part in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    left_over = len(labels) % clients if name == "dirichlet" else 0
    assert len(used) == len(labels) - left_over


@given(case=cases(), alpha=ALPHAS, seed=st.integers(0, 2**32))
def test_dirichlet_clients_are_of_equal_size(
    case: tuple[Labels, int], alpha: float, seed: int
) -> None:
    labels, clients = case
    parts = dirichlet(labels, clients, alpha, np.random.default_rng(seed))
    assert {len(part) for part in parts} == {len(labels) // clients}


@given(
    case=cases(), alpha=ALPHAS, seed=st.integers(0, 2**32), share=st.floats(0, 1, exclude_min=True)
)
def test_unequal_clients_have_the_minimum(
    case: tuple[Labels, int], alpha: float, seed: int, share: float
) -> None:
    labels, clients = case
    minimum = max(1, int(share * (len(labels) // clients)))
    parts = dirichlet_unequal(labels, clients, alpha, np.random.default_rng(seed), minimum)
    assert min(len(part) for part in parts) >= minimum


@given(case=cases(), per_client=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_shards_are_even_and_see_few_classes(
    case: tuple[Labels, int], per_client: int, seed: int
) -> None:
    labels, clients = case
    clients = max(1, clients // per_client)
    per_client = min(per_client, len(labels) // clients)
    parts = shards(labels, clients, per_client, np.random.default_rng(seed))
    shard = len(labels) / (clients * per_client)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= per_client * np.floor(shard)
    assert max(sizes) <= per_client * np.ceil(shard)


def test_two_shards_of_balanced_classes_hold_at_most_two_classes() -> None:
    labels = balanced(1000, 10)
    parts = shards(labels, 50, 2, np.random.default_rng(0))
    assert max(len(np.unique(labels[part])) for part in parts) == 2
    assert {len(part) for part in parts} == {20}


def test_shards_shuffle_the_order_of_the_file() -> None:
    parts = shards(np.zeros(1000), 2, 1, np.random.default_rng(0))
    assert 200 < np.count_nonzero(parts[0] < 500) < 300


@given(st.lists(st.sampled_from(["a", "b", "c", "7"]), min_size=1))
def test_by_id_gives_each_id_its_own(ids: list[str]) -> None:
    parts = by_id(ids)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(ids)))
    owners = [{ids[i] for i in part} for part in parts]
    assert owners == [{each} for each in sorted(set(ids))]


@pytest.mark.parametrize("split", [dirichlet, dirichlet_unequal])
def test_a_large_alpha_is_near_iid(split: Callable[..., Parts]) -> None:
    labels = balanced(20_000, 10)
    chance = distance_from_even(iid(20_000, 20, np.random.default_rng(0)), labels)
    for alpha in (1e4, 1e50, float("inf")):
        parts = split(labels, 20, alpha, np.random.default_rng(1))
        assert distance_from_even(parts, labels) < 1.5 * chance


@pytest.mark.parametrize("alpha", [1e-3, 1e-6, 1e-300])
def test_a_small_alpha_gives_few_classes(alpha: float) -> None:
    labels = balanced(20_000, 10)
    parts = dirichlet(labels, 20, alpha, np.random.default_rng(1))
    assert classes_per_client(parts, labels) < 4  # more than one only where classes ran out
    assert classes_per_client(parts, labels) < classes_per_client(
        dirichlet(labels, 20, 1.0, np.random.default_rng(1)), labels
    )


@pytest.mark.parametrize("alpha", [1e-3, 1e-6, 1e-300])
def test_a_small_alpha_gives_each_class_to_few_clients(alpha: float) -> None:
    labels = balanced(20_000, 10)
    parts = dirichlet_unequal(labels, 100, alpha, np.random.default_rng(1))
    largest = np.sort([len(part) for part in parts])[-10:]
    assert largest.sum() > 0.9 * 20_000


def test_unequal_parts_follow_the_drawn_proportions() -> None:
    """Golden: the mixes are the generator's first draw, and cuts are at their rounded sums."""
    labels = np.repeat([0, 1], [300, 700])
    parts = dirichlet_unequal(labels, 4, 5.0, np.random.default_rng(3))
    mixes = np.random.default_rng(3).dirichlet(np.full(4, 5.0), size=2)
    for label, mix, size in ((0, mixes[0], 300), (1, mixes[1], 700)):
        counts = [np.count_nonzero(labels[part] == label) for part in parts]
        np.testing.assert_allclose(counts, mix * size, atol=1)


def test_slots_are_fair_when_classes_run_out() -> None:
    """The order of clients does not matter: all see as many classes on average."""
    labels = balanced(2000, 10)
    kinds = np.zeros(20)
    for seed in range(40):
        parts = dirichlet(labels, 20, 0.1, np.random.default_rng(seed))
        kinds += [len(np.unique(labels[part])) for part in parts]
    first, last = kinds[:10].mean() / 40, kinds[10:].mean() / 40
    assert abs(first - last) < 0.5


class BrokenSampler(np.random.Generator):
    """A generator whose Dirichlet draws underflow."""

    def dirichlet(self, alpha: Any, size: Any = None) -> NDArray[np.float64]:
        mixes = np.zeros((size, len(alpha)))
        mixes[::2] = np.nan
        return mixes


@pytest.mark.parametrize("split", [dirichlet, dirichlet_unequal])
def test_invalid_proportions_become_one_class(split: Callable[..., Parts]) -> None:
    parts = split(balanced(100, 5), 10, 1e-6, BrokenSampler(np.random.PCG64(0)))
    assert len(np.unique(np.concatenate(parts))) == 100


def test_subnormal_odds_still_yield_a_class() -> None:
    """The odds of the second class underflow when multiplied; the loop must still terminate."""
    mix = np.array([[1.0, 5e-324]] * 3)
    owner = np.repeat(np.arange(3), 4)
    drawn = partition.draw_classes(owner, mix, np.array([6, 6]), np.random.default_rng(0))
    assert np.bincount(drawn).tolist() == [6, 6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rng: iid(3, 4, rng), "use fewer clients"),
        (lambda rng: iid(3, 0, rng), "clients must be at least 1, not 0"),
        (lambda rng: UNTYPED.iid(9, 3.0, rng), "clients must be a whole number: 3.0"),
        (
            lambda rng: UNTYPED.dirichlet([0] * 9, 3, 0.3, 0),
            r"rng is int; give numpy.random.default_rng",
        ),
        (lambda rng: dirichlet([0, 1], 3, 0.3, rng), "use fewer clients"),
        (lambda rng: dirichlet([0, 1], 1, 0.0, rng), "alpha must be positive"),
        (lambda rng: dirichlet([0, 1], 1, float("nan"), rng), "alpha must be positive"),
        (lambda rng: UNTYPED.dirichlet([0, 1], 1, "0.3", rng), "alpha must be positive, not '0.3'"),
        (lambda rng: dirichlet([[0], [1]], 1, 0.3, rng), "one value per example"),
        (lambda rng: dirichlet_unequal([0] * 9, 2, 0.3, rng, minimum=5), "5 examples out of 9"),
        (lambda rng: dirichlet_unequal([0] * 9, 2, 0.3, rng, minimum=0), "at least 1"),
        (lambda rng: shards([0] * 9, 5, 2, rng), "2 examples out of 9"),
        (lambda rng: shards([0] * 9, 5, 0, rng), "at least 1"),
        (lambda rng: dirichlet([0, 1, float("nan")], 1, 0.3, rng), "1 label is NaN; drop this row"),
        (lambda rng: dirichlet_unequal([0, float("nan")], 1, 0.3, rng), "1 label is NaN"),
        (
            lambda rng: UNTYPED.shards([0, None, None], 1, 1, rng),
            "2 labels are None; drop",
        ),
        (lambda rng: UNTYPED.shards([0, {}], 1, 1, rng), "labels of different kinds"),
        (lambda rng: UNTYPED.iid(10.0, 3, rng), "examples must be a whole number: 10.0"),
        (lambda rng: by_id([]), "no ids"),
        (lambda rng: by_id([("a", 1), ("b", 2)]), "one value per example"),
        (lambda rng: by_id([[1], [1, 2]]), "one value per example"),
        (lambda rng: by_id(np.array([None, 3])), "1 id is None; drop this row"),
        (lambda rng: by_id(np.array(["a", 3], object)), "ids of different kinds"),
    ],
)
def test_invalid_arguments_are_refused(call: Callable[..., Parts], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(np.random.default_rng(0))
