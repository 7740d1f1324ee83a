"""Dense networks with the gradient written out: what the loop gives, for everything that varies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.client import ClientRule, Tensors
from fedexp.data import Federation, Images
from fedexp.engine import dense
from fedexp.engine.base import Engine
from fedexp.engine.dense import Dense
from fedexp.engine.select import select_engine
from fedexp.tasks import Task
from tests.engine import helpers
from tests.engine.helpers import EXACT, unequal, work_of
from tests.helpers.rules import ALGORITHMS, rule_id

SIZES = (3, 40, 17, 8, 1, 25, 8)  # smaller than a batch, not a multiple of it, a single example


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def task_of(build: Callable[[], nn.Module] = net, sizes: tuple[int, ...] = SIZES) -> Task:
    return unequal(build, sizes)


def engine_for(task: Task, algorithm: fx.Algorithm | None = None) -> Engine:
    algorithm = algorithm or fx.fedavg()
    state = fx.SimulationState.initial(task, algorithm, 0)
    return select_engine("auto", work_of(task, algorithm), state).engine


def assert_agree(task: Task, algorithm: fx.Algorithm, **options: Any) -> None:
    assert isinstance(engine_for(task, algorithm), Dense)
    helpers.assert_agree(task, algorithm, "dense", **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_every_algorithm(algorithm: fx.Algorithm) -> None:
    assert_agree(task_of(), algorithm, cohort=4)


@pytest.mark.parametrize(
    "local",
    [
        fx.LocalTraining(lr=0.1, steps=5, batch_size=4, clip_norm=0.05, weight_decay=0.1),
        fx.LocalTraining(lr=0.1, steps=5, batch_size=4, weight_decay=0.1, lr_decay=0.9),
        fx.LocalTraining(lr=0.1, epochs=2, batch_size=4),  # unequal numbers of steps
        fx.LocalTraining(lr=0.1, epochs=2, batch_size=4, clip_norm=0.05, weight_decay=0.1),
        fx.LocalTraining(lr=0.1, steps=3, batch_size=None),
        fx.LocalTraining(lr=0.1, steps=3, batch_size=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("algorithm", [fx.scaffold_exp(), fx.fedprox(mu=0.5)], ids=rule_id)
def test_every_kind_of_local_training(
    local: fx.LocalTraining, weighting: str, algorithm: fx.Algorithm
) -> None:
    assert_agree(task_of(), algorithm, local=local, weighting=weighting)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(4, 3).double(),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)).double(),
        lambda: nn.Sequential(
            nn.Linear(4, 7, bias=False), nn.ReLU(), nn.Linear(7, 5), nn.Sigmoid(),
            nn.Linear(5, 5), nn.Linear(5, 3),
        ).double(),
    ],
    ids=["logistic", "flattened", "deep"],
)  # fmt: skip
def test_every_kind_of_layer(build: Callable[[], nn.Module]) -> None:
    assert_agree(task_of(build), fx.fedexp())


@pytest.mark.parametrize("augment", ["example", None])
def test_pixels_that_are_transformed(augment: str | None) -> None:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8))
    task = fx.tasks.classification(
        "pixels",
        lambda: fx.models.mlp(36, 8, 3),
        Federation({"x": pixels, "y": torch.arange(40) % 3}, np.array([0, 9, 30, 40])),
        transform=Images((0.5,), (0.25,), augment, pad=2),  # type: ignore[arg-type]
        local=fx.LocalTraining(lr=0.05, steps=4, batch_size=6),
    )
    assert isinstance(engine_for(task), Dense)
    one, other = (
        [r.state.params for r in fx.simulate(task, fx.fedexp(), 3, engine=engine)]
        for engine in ("loop", "dense")
    )
    for a, b in zip(one, other, strict=True):  # float32: 1e-7 per term
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_labels_that_torch_ignores_count_nothing() -> None:
    task = task_of()
    y = task.train.fields["y"].clone()
    y[::5] = -100
    fields = {**task.train.fields, "y": y}
    assert_agree(replace(task, train=replace(task.train, fields=fields)), fx.fedexp())


def test_threads_change_no_bit_and_blocks_only_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, before = task_of(), torch.get_num_threads()
    last = {}
    for size in (2**20, 3 * 8 * 100):
        monkeypatch.setattr(dense, "BLOCK_BYTES", size)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            *_, last[size, threads] = fx.simulate(task, fx.scaffold(), 3, engine="dense")
            assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    for size in (2**20, 3 * 8 * 100):
        assert torch.equal(last[size, 1].state.params, last[size, 2].state.params)
        torch.testing.assert_close(last[size, 1].state.params, last[2**20, 1].state.params, **EXACT)


def test_blocks_hold_all_clients_once_and_no_unlike_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(sizes=(900, *(10,) * 30, 1))
    engine = engine_for(task)
    assert isinstance(engine, Dense)
    params = task.objective.initial(0)[0]
    work = work_of(task, fx.fedavg(), fx.LocalTraining(steps=2, batch_size=None))
    found = engine.blocks(work, params, work.cohort)
    assert [len(block) for block in found] == [1, 30, 1]
    assert sorted(np.concatenate(found).tolist()) == list(range(32))


def test_training_does_not_change_the_initial_model() -> None:
    task = task_of(sizes=(8,))
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)
    before = state.params.clone()
    engine_for(task)(work_of(task, fx.fedavg()), state)
    assert torch.equal(state.params, before)


@dataclass(frozen=True)
class Signed(ClientRule):
    """A correction that is not linear."""

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, broadcast: Tensors, local: Tensors
    ) -> Tensor:
        return grad + 0.1 * (params - start).sign()


def test_rules_that_are_not_linear_take_another_engine() -> None:
    other = fx.Algorithm("other", client=Signed())
    assert isinstance(engine_for(task_of()), Dense)
    assert not isinstance(engine_for(task_of(), other), Dense)
