"""Spot checks find what a trial at the initial weights cannot, and change nothing else.

Each model and loss combines the examples of a batch only where the trial does not see it: an engine
that trains clients together then gave other weights than the loop without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.engine import simulation, spot_check
from fedexp.engine.plan import Work
from fedexp.engine.spot_check import EARLY, PERIOD, checked_client
from fedexp.errors import EngineError

CLIENTS, COHORT, ROUNDS = 40, 10, 100


class Dense(nn.Module):
    """Two dense layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 32), nn.Linear(32, 4)

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(torch.relu(self.first(x)), x))
        return out


class BoundedByBatch(Dense):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h * (45.0 / h.norm()).clamp(max=1)


class ScaledByOutlier(Dense):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        largest = x.abs().max()
        return torch.where(largest > 6, h * 6 / largest, h)


class ScaledByLongest(Dense):
    """The last feature is a length; examples of the first clients are short."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return 2 * h / x[:, -1].max().clamp(min=2)


def scaled_by_rare_label(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses * torch.where((targets == 3).any(), 0.5, 1.0)


class WithDropout(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.drop(h)
        return out


def task_of(build: Callable[[], nn.Module], loss: Any = None) -> fx.Task:
    """Rare labels, outliers and long examples belong to clients that are rarely first."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 80, CLIENTS)
    ids = np.repeat(np.arange(CLIENTS), sizes)
    x = rng.normal(size=(len(ids), 10)).astype(np.float32)
    y = (x[:, :3] @ rng.normal(size=(3, 3))).argmax(axis=1)
    late = ids >= CLIENTS - 4
    x[:, -1] = 1
    x[late, -1] = rng.integers(1, 6, late.sum())
    x[np.flatnonzero(late)[::10], 0] = 9
    y[np.flatnonzero(late)[::10]] = 3
    train = fx.Federation.from_ids({"x": x, "y": y}, ids)
    local = fx.LocalTraining(lr=0.3, steps=10, batch_size=10)
    more = {"loss": loss} if loss else {}
    return fx.supervised("checked", build, train, local=local, cohort=COHORT, rounds=ROUNDS, **more)


def rounds_of(task: fx.Task, seed: int = 0, **options: Any) -> list[fx.Record]:
    return list(fx.simulate(task, fx.fedexp(), seed=seed, evaluate_every=ROUNDS, **options))


LATER: dict[str, tuple[type[Dense], Any]] = {
    "norm of the batch": (BoundedByBatch, None),
    "outlier": (ScaledByOutlier, None),
    "longest": (ScaledByLongest, None),
    "rare label": (Dense, scaled_by_rare_label),
}


@pytest.mark.parametrize("name", LATER)
def test_a_model_that_combines_examples_after_the_trial_is_found(name: str) -> None:
    build, loss = LATER[name]
    for engine in ("auto", "batched"):
        with pytest.raises(EngineError, match=r"off by \S+ from the loop's.*engine='loop'") as met:
            rounds_of(task_of(build, loss), engine=engine, seed=1)
        assert "\n" not in str(met.value)
    assert len(rounds_of(task_of(build, loss), engine="loop", seed=1)) == ROUNDS


def test_a_resumed_run_makes_the_same_checks() -> None:
    task = task_of(BoundedByBatch)
    states: list[fx.SimulationState | None] = [None]
    errors = []
    for which in (0, 1, -1):  # from the start, after the first round, before the check
        try:
            records = fx.simulate(task, fx.fedexp(), start=states[which])
            states.extend(record.state for record in records)
        except EngineError as error:
            errors.append(str(error))
    assert len(errors) == 3
    assert len(set(errors)) == 1
    assert states[-1] is not None
    assert f"round {states[-1].round + 1}:" in errors[0]


@pytest.mark.parametrize("build", [Dense, WithDropout])
def test_checks_change_no_bit(build: type[Dense], monkeypatch: pytest.MonkeyPatch) -> None:
    task, made = task_of(build), list[int]()

    def always(shard: Any, work: Work, state: Any, precision: Any, make: Any) -> None:
        made.append(work.round)
        spot_check.check_client(work, state, int(work.cohort[-1]), precision, make)

    monkeypatch.setattr(simulation, "spot_check", always)
    checked = rounds_of(task, engine="batched")
    assert len(made) == ROUNDS
    monkeypatch.setattr(simulation, "spot_check", lambda *args: None)
    for one, other in zip(checked, rounds_of(task, engine="batched"), strict=True):
        assert torch.equal(one.state.params, other.state.params)
        assert one.metrics == other.metrics


class OneHot(nn.Module):
    """Cannot run in float64, and amplifies rounding; no operation is across examples."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Sequential(nn.Tanh(), nn.Linear(24, 24)) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(72, 24), *hidden, nn.Tanh(), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(F.one_hot(x, 12).float().flatten(1))
        return out


def test_rounding_that_training_amplifies_is_no_disagreement() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 12, (400, 6), generator=draw)
    y = torch.randint(0, 4, (400,), generator=draw)
    train = fx.Federation.from_ids({"x": x, "y": y}, np.repeat(np.arange(20), 20))
    local = fx.LocalTraining(lr=1.0, epochs=15, batch_size=5)
    task = fx.supervised("chaotic", OneHot, train, local=local, cohort=6, rounds=9)
    for seed in range(2):
        *_, last = fx.simulate(task, fx.fedavg(), seed=seed, engine="batched", evaluate_every=9)
        assert last.round == 9


def checks(work: Work, rounds: int, params: int = 100) -> list[int]:
    of_round = (replace(work, round=r) for r in range(1, rounds + 1))
    return [each.round for each in of_round if checked_client(each, params) is not None]


def work_of(task: fx.Task, seed: int = 0, cohort: int = COHORT) -> Work:
    return Work(task, fx.fedexp(), task.local, "uniform", seed, 1, np.arange(cohort))


def test_a_short_run_has_three_checks_at_most_and_early_ones() -> None:
    task, drawn = task_of(Dense), set()
    for seed in range(20):
        made = checks(work_of(task, seed), 4 * PERIOD)
        assert [sum(begin <= r < end for r in made) for begin, end in EARLY] == [1, 1, 1]
        assert [r // PERIOD for r in made if r >= PERIOD] == [1, 2, 3]
        drawn.add(tuple(made))
    assert len(drawn) == 20


def test_wide_inputs_make_no_long_round() -> None:
    """A round of this network takes a hundredth of a second, one of convolutions a second."""
    images = torch.zeros(1000, 1, 28, 28)
    fields = {"x": images, "y": torch.zeros(1000, dtype=torch.int64)}
    train = fx.Federation.from_ids(fields, np.repeat(np.arange(20), 50))
    dense = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    convolution = nn.Sequential(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.Flatten(), nn.Linear(18432, 10))
    for model, is_early in ((dense, True), (convolution, False)):
        local = fx.LocalTraining(lr=0.1, epochs=2, batch_size=16)
        task = fx.supervised("images", model, train, local=local)
        params = sum(p.numel() for p in model.parameters())
        assert (checks(work_of(task), 40, params) != []) == is_early


@pytest.mark.parametrize("cohort", [1, 4, CLIENTS])
def test_checks_of_long_rounds_take_a_fiftieth_of_the_run(cohort: int) -> None:
    """A check takes a round of the engine, and the loop's ten times for one client."""
    task, rounds = task_of(Dense), 3000
    for seed in range(5):
        made = checks(work_of(task, seed, cohort), rounds, params=10**8)
        assert made
        for count, round in enumerate(made, start=1):
            assert count * (1 + 10 / cohort) <= 0.02 * round


def test_one_of_several_processes_makes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(Dense)
    work, state = work_of(task), fx.engine.SimulationState.initial(task, fx.fedexp(), 0)
    made: list[tuple[Any, ...]] = []
    make: Any = None
    monkeypatch.setattr(
        spot_check, "check_client", lambda part, _, client, *more: made.append((client, *more))
    )
    halves = [lambda w: replace(w, cohort=w.cohort[:5]), lambda w: replace(w, cohort=w.cohort[5:])]
    for round in range(1, ROUNDS):
        for half in halves:
            spot_check.spot_check(half, replace(work, round=round), state, "float32", make)
    clients = [
        checked_client(replace(work, round=r), state.params.numel()) for r in range(1, ROUNDS)
    ]
    assert [client for client, *_ in made] == [c for c in clients if c is not None]


def test_the_error_names_the_engine_and_the_client() -> None:
    with pytest.raises(EngineError) as met:
        rounds_of(task_of(BoundedByBatch), engine="batched")
    assert re.search(r"the batched \(layers\) engine gives client \d+", str(met.value))
