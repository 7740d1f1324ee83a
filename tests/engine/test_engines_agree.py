"""The batched engine gives what the loop gives, round by round, for everything that can vary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine import batched, loop
from fedexp.engine.batched import Batched
from fedexp.engine.plan import Work
from fedexp.engine.select import select_engine
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task
from tests.helpers.problems import BatchNormNet, Net, dropout_net, least_squares
from tests.helpers.rules import ALGORITHMS, rule_id

SIZES = (3, 40, 17, 8, 1, 25)  # smaller than a batch, not a multiple of it, a single example
# Both sum the same numbers in another order; float64 leaves 1e-16 a term, grown over the rounds.
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def net() -> nn.Module:
    return Net().double()


def double_batch_norm() -> nn.Module:
    return BatchNormNet().double()


def unequal(build: Callable[[], nn.Module] = net, sizes: tuple[int, ...] = SIZES) -> Task:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, sum(sizes))
    x = rng.normal(size=(3, 4))[y] + rng.normal(size=(len(y), 4))
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    local = fx.LocalTraining(lr=0.1, steps=6, batch_size=8)
    offsets = np.cumsum([0, *sizes])
    return Task("unequal", ModuleObjective(build), Federation(fields, offsets), local, fields)


def both(task: Task, algorithm: fx.Algorithm, **options: object) -> list[tuple[Tensor, Tensor]]:
    runs = [
        [r.state.params for r in fx.simulate(task, algorithm, 4, engine=engine, **options)]  # type: ignore[arg-type]
        for engine in ("loop", "batched")
    ]
    return list(zip(*runs, strict=True))


def assert_agree(task: Task, algorithm: fx.Algorithm, **options: object) -> None:
    for one, other in both(task, algorithm, **options):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_every_algorithm(algorithm: fx.Algorithm) -> None:
    assert_agree(unequal(), algorithm, cohort=4)
    assert_agree(least_squares(clients=6), algorithm, cohort=4)


@pytest.mark.parametrize(
    "local",
    [
        fx.LocalTraining(lr=0.1, steps=5, batch_size=4, clip_norm=0.05),
        fx.LocalTraining(lr=0.1, steps=5, batch_size=4, weight_decay=0.1, lr_decay=0.9),
        fx.LocalTraining(lr=0.1, epochs=2, batch_size=4),  # unequal numbers of steps
        fx.LocalTraining(lr=0.1, steps=3, batch_size=None),
        fx.LocalTraining(lr=0.1, steps=3, batch_size=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_every_kind_of_local_training(local: fx.LocalTraining, weighting: str) -> None:
    assert_agree(unequal(), fx.scaffold_exp(), local=local, weighting=weighting)


@pytest.mark.parametrize("sizes", [(7, 7, 7), (4, 9, 30, 2)])
def test_batch_norm(sizes: tuple[int, ...]) -> None:
    """Batches of other lengths run in groups: padding would enter the statistics."""
    local = fx.LocalTraining(lr=0.05, steps=4, batch_size=7)
    task = unequal(double_batch_norm, sizes)
    runs = [
        list(fx.simulate(task, fx.fedexp(), 3, local=local, engine=engine))
        for engine in ("loop", "batched")
    ]
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one.state.params, other.state.params, **EXACT)
        torch.testing.assert_close(
            one.state.buffers.averaged, other.state.buffers.averaged, **EXACT
        )
        assert torch.equal(one.state.buffers.kept, other.state.buffers.kept)


class Masked(nn.Module):
    """Buffers that are not int64, and one that is replaced at every call."""

    mask: Tensor
    scale: Tensor
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("scale", torch.tensor([2], dtype=torch.uint8))
        self.register_buffer("running", torch.zeros(4).double())

    def forward(self, x: Tensor) -> Tensor:
        self.running = 0.9 * self.running + 0.1 * x.mean(0).detach()
        out: Tensor = self.layer((x - self.running) * (~self.mask) * self.scale)
        return out


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x - x.mean(0))
        return out


@pytest.mark.parametrize("build", [Masked, Centred])
def test_odd_buffers_and_models_that_mix_examples(build: type[nn.Module]) -> None:
    task = unequal(build)
    runs = [
        list(fx.simulate(task, fx.fedavg(), 3, engine=engine))
        for engine in ("loop", "batched", "loop")
    ]
    for one, other, again in zip(*runs, strict=True):
        assert torch.equal(one.state.params, again.state.params)
        torch.testing.assert_close(one.state.params, other.state.params, **EXACT)
        assert torch.equal(one.state.buffers.averaged, again.state.buffers.averaged)
        torch.testing.assert_close(
            one.state.buffers.averaged, other.state.buffers.averaged, **EXACT
        )
    assert build is Centred or runs[0][-1].state.buffers.averaged.any()


def test_losses_of_several_outputs_are_averaged() -> None:
    task = unequal(lambda: nn.Linear(4, 2).double())
    fields = {**task.train.fields, "y": task.train.fields["x"][:, :2].contiguous()}
    objective = ModuleObjective(
        lambda: nn.Linear(4, 2).double(), nn.MSELoss(reduction="none"), classifies=False
    )
    task = replace(task, objective=objective, train=replace(task.train, fields=fields), test=None)
    assert_agree(task, fx.fedexp())
    reduced = ModuleObjective(lambda: nn.Linear(4, 2).double(), nn.MSELoss(), classifies=False)
    with pytest.raises(fx.UsageError, match="reduction='none'"):
        list(fx.simulate(replace(task, objective=reduced), fx.fedexp(), 1, engine="loop"))


def test_auto_leaves_very_unequal_clients_to_the_loop() -> None:
    local = fx.LocalTraining(lr=0.1, steps=2, batch_size=None)
    for sizes, expected in (((10,) * 6, Batched), ((10,) * 30 + (900,), loop.Loop)):
        task = unequal(net, sizes)
        state = fx.SimulationState.initial(task, fx.fedavg(), 0)
        work = Work(task, fx.fedavg(), local, "uniform", 0, 1, np.arange(len(sizes)))
        assert isinstance(select_engine("auto", work, state), expected)


@pytest.mark.parametrize("augment", ["example", "batch", None])
def test_augmentation(augment: str | None) -> None:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8))
    fields = {"x": pixels, "y": torch.from_numpy(rng.integers(0, 3, 40))}
    task = fx.tasks.classification(
        "pixels",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)),
        Federation(fields, np.array([0, 9, 30, 40])),
        transform=Images((0.5,), (0.25,), augment, pad=2),  # type: ignore[arg-type]
        local=fx.LocalTraining(lr=0.05, steps=4, batch_size=6),
    )
    for one, other in both(task, fx.fedexp()):  # float32: 1e-7 a term
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_dropout_agrees_in_distribution() -> None:
    """Means over many clients of the same data: the noise differs, its mean does not."""
    rng = np.random.default_rng(0)
    one = {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": rng.integers(0, 3, 8)}
    many = {name: torch.from_numpy(np.concatenate([v] * 400)) for name, v in one.items()}
    federation = Federation(many, np.arange(401) * 8)
    local = fx.LocalTraining(lr=0.1, steps=2, batch_size=None)
    task = Task("dropout", ModuleObjective(dropout_net), federation, local)
    loop, batched = (
        next(fx.simulate(task, fx.fedavg(), 1, engine=engine)).state.params
        for engine in ("loop", "batched")
    )
    moved = (loop - task.objective.initial(0)[0]).norm()
    assert (loop - batched).norm() < 0.1 * moved
    assert not torch.equal(loop, batched)


def test_dropout_differs_between_clients_of_a_batch() -> None:
    task = unequal(dropout_net, (8, 8))
    params, buffers = task.objective.initial(0)
    client = task.train.client(0)
    twice = {
        n: torch.stack([v, v]).to(torch.float32 if n == "x" else v.dtype) for n, v in client.items()
    }
    pair = type(buffers)(*(b.expand(2, -1) for b in buffers))
    grads, _ = task.objective.gradients(params.expand(2, -1), pair, twice, torch.ones(2, 8))  # type: ignore[attr-defined]
    assert not torch.equal(grads[0], grads[1])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = unequal()
    whole = [r.state.params for r in fx.simulate(task, fx.scaffold_exp(), 3, engine="batched")]
    monkeypatch.setitem(batched.COHORT_BYTES, "cpu", 2 * whole[0].numel() * 8)
    parts = [r.state.params for r in fx.simulate(task, fx.scaffold_exp(), 3, engine="batched")]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_out_of_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = Batched.run_clients

    def tight(self, work, state, clients):  # type: ignore[no-untyped-def]
        tried.append(len(clients))
        if len(clients) > 2:
            raise torch.OutOfMemoryError("no more")
        return real(self, work, state, clients)

    monkeypatch.setattr(Batched, "run_clients", tight)
    task = unequal()
    params = fx.SimulationState.initial(task, fx.fedexp(), 0)
    work = Work(task, fx.fedexp(), task.local, "uniform", 0, 1, np.arange(6))
    total, _ = Batched()(work, params)
    assert (tried, int(total.count)) == ([6, 3, 1, 1, 1, 1, 1, 1], 6)


class Stubborn(nn.Module):
    """Control flow on values: torch.func cannot batch it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum() > 0 else -out


def test_a_model_that_cannot_be_batched_falls_back_and_says_why() -> None:
    task = unequal(Stubborn)
    with pytest.warns(fx.errors.EngineWarning, match="one after another: .+"):
        records = list(fx.simulate(task, fx.fedavg(), 2))
    assert len(records) == 2
    with pytest.raises(fx.UsageError, match="use engine='loop'"):
        list(fx.simulate(task, fx.fedavg(), 2, engine="batched"))


def test_auto_follows_the_model() -> None:
    cpu = torch.device("cpu")
    dense, convolving = unequal(), ModuleObjective(lambda: nn.Conv2d(1, 2, 3))
    assert dense.objective.batching_pays(cpu)  # type: ignore[attr-defined]
    assert not convolving.batching_pays(cpu)
    assert convolving.batching_pays(torch.device("cuda"))
    state = fx.SimulationState.initial(dense, fx.fedavg(), 0)
    work = Work(dense, fx.fedavg(), dense.local, "uniform", 0, 1, np.arange(6))
    assert isinstance(select_engine("auto", work, state), Batched)
    assert isinstance(select_engine("loop", work, state), loop.Loop)
