"""Search spaces: the paper's grids as data (docs/paper.md#grids), and ranges of a free search.

Which options an algorithm is tuned over follows from the options it has:

    client.mu     FedProx: mu alone, with the step sizes of FedAvg (App. D.5)
    server.eps    FedExP and variants: eps and local.lr; on least squares eps = 0 and local.lr alone
    server.tau    FedAdagrad, FedAdam, FedYogi, FedAMS: server.lr and local.lr
    otherwise     FedAvg, SCAFFOLD, FedAvg-M, FedNova: server.lr and local.lr; FedHyper too, with
                  those server.lr that are within its bounds

The paper prints no grid for FedAdam and FedAvg-M ("a similar process"): they have those of
FedAdagrad and FedAvg, which hold the best values that it does print.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real

import numpy as np

from fedexp.errors import UsageError, require
from fedexp.options import Setup

Point = dict[str, float]
Values = Mapping[str, tuple[float, ...]]

# Base-10 logarithms, as printed in App. D.3; for least squares the paper prints 0.5 twice.
LOCAL_LR = (-2, -1.5, -1, -0.5, 0)
EPS = (-3, -2.5, -2, -1.5, -1)
MU = (-3, -2, -1, 0)
AVERAGE_LR = {"least squares": (0, 0.5, 0.5, 1, 2), "networks": (-1, -0.5, 0, 0.5, 1)}
ADAPTIVE_LR = {"least squares": (-1, -0.5, 0, 0.5, 1), "networks": (-2, -1.5, -1, -0.5, 0)}
# A free search extends half a decade beyond the grids, and also tunes tau.
BEYOND = 0.5  # decades
TAU = (-5, -1)


def paper_grid(setup: Setup, least_squares: bool) -> Values:
    """Return the values per option of the paper's grid search for an algorithm.

    >>> from fedexp.algorithms import fedavg
    >>> from fedexp.local import LocalTraining
    >>> grid = paper_grid(Setup(fedavg(), LocalTraining()), least_squares=False)
    >>> {name: [round(value, 3) for value in values] for name, values in grid.items()}
    {'server.lr': [0.1, 0.316, 1.0, 3.162, 10.0], 'local.lr': [0.01, 0.032, 0.1, 0.316, 1.0]}
    """
    options = setup.options()
    if "client.mu" in options:
        return {"client.mu": powers(MU)}
    if "server.eps" in options:
        eps = {} if least_squares else {"server.eps": powers(EPS)}
        return {**eps, "local.lr": powers(LOCAL_LR)}
    return {"server.lr": _server_lr(setup, least_squares), "local.lr": powers(LOCAL_LR)}


def free_ranges(setup: Setup, least_squares: bool) -> Values:
    """Return the smallest and largest value per option of a free search, on a log scale."""
    options = setup.options()
    grid = {"local.lr": powers(LOCAL_LR)}
    if "server.lr" in options:
        grid["server.lr"] = _server_lr(setup, least_squares)
    if "server.eps" in options and not least_squares:
        grid["server.eps"] = powers(EPS)
    if "client.mu" in options:
        grid["client.mu"] = powers(MU)
    if "server.tau" in options:
        grid["server.tau"] = powers(TAU)
    wider = 10**BEYOND
    ranges = {name: (min(values) / wider, max(values) * wider) for name, values in grid.items()}
    if (bounds := setup.algorithm.server.lr_bounds()) is not None:
        ranges["server.lr"] = bounds
    return ranges


def points(values: Values) -> list[Point]:
    """Return every combination; the last option varies fastest."""
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def without_fixed(values: Values, fixed: Collection[str]) -> Values:
    """Return the search space without the options that the user has set.

    >>> list(without_fixed({"server.lr": (1.0,), "local.lr": (0.1,)}, ["lr"]))
    ['local.lr']
    """
    left = {name: v for name, v in values.items() if not any(_names(key, name) for key in fixed)}
    require(
        bool(left), f"nothing is left to tune: {', '.join(values)} are set; leave one of them open"
    )
    return left


def check_none_fixed(values: Values, fixed: Collection[str]) -> Values:
    """Return a search space of the user's own; raise `UsageError` if an option is set as well."""
    twice = [name for name in values if any(_names(key, name) for key in fixed)]
    require(not twice, f"{', '.join(twice)} cannot be both searched and set; leave it out of one")
    return values


def parse_grid(assignments: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return a grid of the user's own, from texts such as `local.lr=0.01,0.1,1`."""
    grid = {}
    for text in assignments:
        key, _, listed = text.partition("=")
        try:
            grid[key.strip()] = tuple(map(float, listed.split(",")))
        except ValueError:
            what = f"--grid takes key=number,number,..., not {text!r}"
            raise UsageError(f"{what}; set anything else with --set") from None
    return grid


def checked_grid(values: Mapping[str, Sequence[float]], setup: Setup) -> Values:
    """Return a grid of the user's own with dotted names.

    >>> from fedexp.algorithms import fedexp
    >>> from fedexp.local import LocalTraining
    >>> checked_grid({"eps": [0.1, 1]}, Setup(fedexp(), LocalTraining()))
    {'server.eps': (0.1, 1.0)}
    """
    require(bool(values), 'the grid is empty; give values, e.g. {"eps": [1e-3, 1e-2]}')
    for name, own in values.items():
        require(
            isinstance(own, Sequence | np.ndarray) and not isinstance(own, str),
            f"the grid has {own!r} for {name}; give a list of values",
        )
        require(len(own) > 0, f"the grid has no value for {name}; give some, or leave it out")
        for value in own:
            setup.with_options({name: value})  # raises for an unknown option or value
            number = isinstance(value, Real) and not isinstance(value, bool)
            require(
                number, f"the grid of {name} takes numbers; set {value!r} with options= (--set)"
            )
    return {setup.full_name(n): tuple(dict.fromkeys(map(float, v))) for n, v in values.items()}


def powers(exponents: Sequence[float]) -> tuple[float, ...]:
    """Return powers of ten, each once."""
    return tuple(dict.fromkeys(10.0**exponent for exponent in exponents))


def _server_lr(setup: Setup, least_squares: bool) -> tuple[float, ...]:
    printed = ADAPTIVE_LR if "server.tau" in setup.options() else AVERAGE_LR
    rates = powers(printed["least squares" if least_squares else "networks"])
    low, high = setup.algorithm.server.lr_bounds() or (0.0, math.inf)
    within = tuple(rate for rate in rates if low <= rate <= high)
    return within or (setup.options()["server.lr"],)


def _names(key: str, full: str) -> bool:
    """Return whether `--set key` sets the option `full`; a plain `lr` is the server's."""
    return key == full or (key == full.rpartition(".")[2] and (key, full) != ("lr", "local.lr"))
