"""The grids are those of the paper (docs/paper.md#grids), or the user's own."""

from __future__ import annotations

import numpy as np
import pytest

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.errors import UsageError
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.tuning.grids import (
    Values,
    checked_grid,
    free_ranges,
    paper_grid,
    parse_grid,
    points,
    without_fixed,
)

# Copied by hand from the appendix: base-10 logarithms, by algorithm, for networks and synthetic.
HALVES: list[float] = [-2, -1.5, -1, -0.5, 0]
PRINTED: dict[str, dict[str, dict[str, list[float]]]] = {
    "networks": {
        "fedavg": {"server.lr": [-1, -0.5, 0, 0.5, 1], "local.lr": HALVES},
        "scaffold": {"server.lr": [-1, -0.5, 0, 0.5, 1], "local.lr": HALVES},
        "fedadagrad": {"server.lr": [-2, -1.5, -1, -0.5, 0], "local.lr": HALVES},
        "fedexp": {"server.eps": [-3, -2.5, -2, -1.5, -1], "local.lr": HALVES},
        "fedprox": {"client.mu": [-3, -2, -1, 0]},
    },
    "synthetic": {
        "fedavg": {"server.lr": [0, 0.5, 1, 2], "local.lr": HALVES},
        "scaffold": {"server.lr": [0, 0.5, 1, 2], "local.lr": HALVES},
        "fedadagrad": {"server.lr": [-1, -0.5, 0, 0.5, 1], "local.lr": HALVES},
        "fedexp": {"local.lr": HALVES},
    },
}
# The best values that the paper prints: (eps or server.lr, local.lr).
BEST: dict[str, dict[str, list[tuple[float, float]]]] = {
    "networks": {
        "fedexp": [(-1, -0.5), (-3, -2)],
        "fedavg": [(0, -0.5), (0, -2)],
        "scaffold": [(0, -0.5), (0, -2)],
        "fedadagrad": [(-0.5, -0.5), (-1, -2)],
        "fedexp-m": [(-3, -2)],
        "fedadam": [(-2, -2)],
        "fedavgm": [(0, -2)],
    },
    "synthetic": {"fedavg": [(1, -1)], "scaffold": [(1, -1)], "fedadagrad": [(-1, -1)]},
}


def setup(algorithm: str) -> Setup:
    return Setup(ALGORITHMS[algorithm](), LocalTraining())


def logs(grid: Values) -> dict[str, list[float]]:
    return {name: [round(float(np.log10(v)), 9) for v in values] for name, values in grid.items()}


@pytest.mark.parametrize("kind", PRINTED)
def test_the_grids_are_those_of_the_paper(kind: str) -> None:
    for algorithm, printed in PRINTED[kind].items():
        assert logs(paper_grid(setup(algorithm), kind == "synthetic")) == printed


@pytest.mark.parametrize("kind", BEST)
def test_the_grids_contain_the_best_values_of_the_paper(kind: str) -> None:
    for algorithm, found in BEST[kind].items():
        grid = logs(paper_grid(setup(algorithm), kind == "synthetic"))
        assert set(found) <= {tuple(point.values()) for point in points(grid)}  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_grid_of_its_own_options(algorithm: str) -> None:
    for least_squares in (False, True):
        for search in (paper_grid, free_ranges):
            values = search(setup(algorithm), least_squares)
            assert set(values) <= set(setup(algorithm).options())
            assert all(value > 0 for each in values.values() for value in each)


def test_free_ranges_contain_the_grid() -> None:
    grid, ranges = (search(setup("fedadam"), False) for search in (paper_grid, free_ranges))
    assert set(ranges) == {"local.lr", "server.lr", "server.tau"}
    for name, values in grid.items():
        low, high = ranges[name]
        assert low < min(values)
        assert max(values) < high


@pytest.mark.parametrize("least_squares", [True, False])
def test_fedhypers_first_step_size_is_searched_within_its_bounds(least_squares: bool) -> None:
    for rule in (fx.Hypergradient(), fx.Hypergradient(150.0, low=120.0, high=200.0)):
        setup = Setup(fx.Algorithm(server=rule), LocalTraining())
        grid, free = paper_grid(setup, least_squares), free_ranges(setup, least_squares)
        for value in (*grid["server.lr"], *free["server.lr"]):
            assert rule.low <= value <= rule.high


def test_points_are_every_combination() -> None:
    assert len(points(paper_grid(setup("fedavg"), False))) == 25
    assert points({"a": (1.0, 2.0), "b": (3.0,)}) == [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 3.0}]


def test_options_that_the_user_sets_are_not_searched() -> None:
    grid = paper_grid(setup("fedavg"), False)
    assert list(without_fixed(grid, ["local.lr", "clip_norm"])) == ["server.lr"]
    assert list(without_fixed(grid, ["lr"])) == ["local.lr"]
    with pytest.raises(UsageError, match="nothing is left to tune"):
        without_fixed(grid, ["lr", "local.lr"])


def grid_of(*texts: str) -> Values:
    return checked_grid(parse_grid(texts), setup("fedavg"))


def test_a_grid_of_the_users_own() -> None:
    own = grid_of("local.lr=0.1, 1", "steps=5,10,5")
    assert own == {"local.lr": (0.1, 1.0), "local.steps": (5.0, 10.0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local.lr", "takes key=number,number,..., not 'local.lr'; set anything else with --set"),
        ("local.lr=0.1,x", "takes key=number"),
        ("locl.lr=1", "did you mean local.lr"),
        ("local.lr=0", "local.lr must be"),
        ("weighting=size", "takes key=number"),
        ("nesterov=0.5", "must be true or false"),
    ],
)
def test_a_grid_with_a_mistake(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid_of(text)
