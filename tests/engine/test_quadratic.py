"""Least squares in closed form: what the loop gives step by step, for everything that varies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp.client import ClientRule, Tensors
from fedexp.data import Federation
from fedexp.engine import EngineName
from fedexp.engine.base import Engine
from fedexp.engine.quadratic import Quadratic
from fedexp.engine.select import select_engine
from fedexp.engine.simulation import run_round
from fedexp.objective import LeastSquares
from fedexp.tasks import Task
from tests.engine.helpers import assert_same_state, work_of
from tests.helpers.rules import ALGORITHMS, rule_id

SIZES = (3, 3, 3, 12, 7, 7, 1, 9)  # neighbours of one size, more rows than columns, a single row
LOCAL = fx.LocalTraining(lr=0.1, steps=15, batch_size=None)


def regression(sizes: tuple[int, ...] = SIZES, dim: int = 8, scale: float = 1.0) -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), dim)) / np.sqrt(dim)
    x[1] = x[0]  # a matrix of lower rank, with an eigenvalue of zero
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(rng.normal(size=len(x)))}
    objective = LeastSquares(torch.from_numpy(rng.normal(size=dim)), scale)
    return Task("rows", objective, Federation(fields, np.cumsum([0, *sizes])), LOCAL, sums=True)


def engine_for(
    task: Task, algorithm: fx.Algorithm, local: fx.LocalTraining, name: EngineName = "auto"
) -> Engine:
    state = fx.SimulationState.initial(task, algorithm, 0)
    return select_engine(name, work_of(task, algorithm, local), state).engine


def assert_agree(task: Task, algorithm: fx.Algorithm, **options: Any) -> None:
    runs = [
        list(fx.simulate(task, algorithm, 5, engine=engine, **options))
        for engine in ("loop", "auto")
    ]
    for one, other in zip(*runs, strict=True):
        assert_same_state(one.state, other.state)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
@pytest.mark.parametrize("cohort", [None, 5])
def test_every_algorithm(algorithm: fx.Algorithm, cohort: int | None) -> None:
    assert isinstance(engine_for(regression(), algorithm, LOCAL), Quadratic)
    assert_agree(regression(), algorithm, cohort=cohort)


@pytest.mark.parametrize(
    "local",
    [
        replace(LOCAL, weight_decay=0.3),
        replace(LOCAL, lr_decay=0.9, decay_before_first_round=True),
        replace(LOCAL, steps=None, epochs=9),
        replace(LOCAL, lr=1.9),  # steps that overshoot: negative factors
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", [fx.scaffold_exp(), fx.fedprox(mu=0.5)], ids=rule_id)
def test_every_kind_of_local_training(local: fx.LocalTraining, algorithm: fx.Algorithm) -> None:
    task = regression(scale=1.0 if local.lr > 1 else 2.0)
    assert isinstance(engine_for(task, algorithm, local), Quadratic)
    assert_agree(task, algorithm, local=local, weighting="size")


@dataclass(frozen=True)
class Signed(ClientRule):
    """A correction that is not linear."""

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, broadcast: Tensors, local: Tensors
    ) -> Tensor:
        return grad + 0.1 * (params - start).sign()


@pytest.mark.parametrize(
    ("local", "rule"),
    [
        (replace(LOCAL, clip_norm=0.5), fx.SGD()),
        (replace(LOCAL, batch_size=2), fx.SGD()),
        (LOCAL, Signed()),
        (replace(LOCAL, steps=1), fx.SGD()),  # more eigenvalues than the steps are worth
    ],
    ids=str,
)
def test_what_is_not_linear_takes_its_steps(local: fx.LocalTraining, rule: ClientRule) -> None:
    algorithm = fx.Algorithm("other", client=rule)
    assert not isinstance(engine_for(regression(), algorithm, local), Quadratic)
    assert_agree(regression(), algorithm, local=local)


def test_the_loop_stays_the_loop() -> None:
    assert not isinstance(engine_for(regression(), fx.fedexp(), LOCAL, "loop"), Quadratic)


def test_a_client_that_diverges_is_dropped_and_its_state_does_not_change() -> None:
    task = regression()
    fields = {**task.train.fields, "x": task.train.fields["x"].clone()}
    fields["x"][9:21] *= 1e20  # client 3: the steps of such a matrix overflow
    task = replace(task, train=replace(task.train, fields=fields))
    state = fx.SimulationState.initial(task, fx.scaffold(), 0)
    for t in (1, 2):
        record = run_round(work_of(task, fx.scaffold(), LOCAL, t), state, Quadratic())
        state = record.state
        assert record.dropped == 1
    assert set(state.clients) == {0, 1, 2, 4, 5, 6, 7}


def test_client_states_do_not_hold_the_cohort_in_memory() -> None:
    *_, last = fx.simulate(regression(), fx.scaffold(), 1)
    for state in last.state.clients.values():
        assert state["control"].untyped_storage().nbytes() == 8 * 8
