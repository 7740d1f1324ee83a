"""Clients distributed over threads: the loop's numbers, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from time import sleep

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.data.federation import Batch
from fedexp.engine import EngineName, loop
from fedexp.engine.base import Engine, Pool, sum_trained
from fedexp.engine.select import select_engine
from fedexp.engine.threads import SeededDropout, Threads, keep_channels_last
from fedexp.errors import EngineWarning
from fedexp.objective import Buffers, ModuleObjective
from fedexp.tasks import Task
from tests.engine.helpers import assert_same_state, work_of

SIZES = (3, 20, 11, 1, 8)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def network(dropout: float = 0.0) -> nn.Sequential:
    """Convolutional, so that batching does not pay on a CPU, and large enough for threads."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout), nn.Flatten(),
        nn.Linear(36, 2500), nn.ReLU(), nn.Linear(2500, 3),
    ).double()  # fmt: skip


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 700), nn.Linear(700, 3)
    ).double()


class Noisy(nn.Module):
    """Draws from torch's global generator, outside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(F.dropout(x, 0.1, self.training))
        return out


def task_of(build: Callable[[], nn.Module], sizes: tuple[int, ...] = SIZES) -> Task:
    rng = np.random.default_rng(0)
    fields = {
        "x": torch.from_numpy(rng.normal(size=(sum(sizes), 1, 8, 8))),
        "y": torch.from_numpy(rng.integers(0, 3, sum(sizes))),
    }
    local = fx.LocalTraining(lr=0.1, steps=3, batch_size=4, weight_decay=0.01, clip_norm=1.0)
    return Task("images", ModuleObjective(build), Federation(fields, np.cumsum([0, *sizes])), local)


def engine_for(task: Task, name: EngineName = "auto") -> Engine:
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)
    work = work_of(task, fx.fedavg())
    return select_engine(name, work, state).engine


def last(task: Task, algorithm: fx.Algorithm, engine: EngineName) -> fx.SimulationState:
    *_, record = fx.simulate(task, algorithm, 3, engine=engine, evaluate_every=99)
    return record.state


@pytest.mark.parametrize(
    ("build", "sizes"), [(network, SIZES), (normalised, (3, 20, 11, 2, 8))], ids=["plain", "norm"]
)
@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(), fx.scaffold_exp(), fx.fedprox()], ids=lambda a: a.name
)
def test_agrees_with_the_loop(
    build: Callable[[], nn.Module], sizes: tuple[int, ...], algorithm: fx.Algorithm
) -> None:
    task = task_of(build, sizes)
    assert isinstance(engine_for(task), Threads)
    one, other = (last(task, algorithm, engine) for engine in ("loop", "auto"))
    assert_same_state(one, other)


def test_the_number_of_threads_and_of_runs_changes_nothing() -> None:
    task, params = task_of(lambda: network(0.4)), []
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        before = torch.get_rng_state()
        params.append(last(task, fx.fedexp(), "auto").params)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as pool:  # the limit of the engine's threads stays with them
            assert pool.submit(torch.get_num_threads).result() == threads
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])
    assert not torch.equal(params[0], last(task_of(network), fx.fedexp(), "auto").params)


def shared_dropout() -> nn.Module:
    """One dropout layer in two places."""
    layers, drop = list(network()), nn.Dropout(0.3)
    return nn.Sequential(*layers[:3], drop, *layers[4:6], drop, *layers[6:])


def test_threads_are_for_large_models_that_keep_apart_on_several_cores() -> None:
    small = task_of(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)))
    assert isinstance(engine_for(small), loop.Loop)
    assert isinstance(engine_for(task_of(shared_dropout)), Threads)
    with pytest.warns(EngineWarning, match="draws random numbers"):
        assert isinstance(engine_for(task_of(Noisy)), loop.Loop)
    with pytest.raises(fx.UsageError, match=r"draws random numbers.*engine='loop'"):
        engine_for(task_of(Noisy), "threads")
    assert isinstance(engine_for(task_of(network), "loop"), loop.Loop)
    assert isinstance(engine_for(task_of(network), "threads"), Threads)
    torch.set_num_threads(1)
    assert isinstance(engine_for(task_of(network)), loop.Loop)


@pytest.mark.parametrize("updates", [0, 1, 3], ids="{} updates fit".format)
def test_models_too_large_to_hold_many_updates_still_use_all_threads(
    updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    real = sum_trained

    def counted(work, clients, *rest):  # type: ignore[no-untyped-def]
        together.append(len(clients))
        return real(work, clients, *rest)

    task = task_of(network)
    size = task.objective.initial(0)[0].nbytes
    monkeypatch.setattr("fedexp.engine.base.SUMMED_BYTES", updates * size + 1)
    monkeypatch.setattr("fedexp.engine.threads.sum_trained", counted)
    list(fx.simulate(task, fx.fedavg(), 1, evaluate_every=9))
    assert together[-3:] == [2, 2, 1]  # never three, which would leave a thread without work


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 1.0])
def test_own_dropout_drops_and_scales(p: float) -> None:
    layer, x = SeededDropout(p), torch.randn(16, 8, 25, 25).to(memory_format=torch.channels_last)
    layer.generator.manual_seed(0)
    y = layer(x)
    left = y != 0
    spread = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(1 - left.float().mean().item() - p) <= 4 * spread
    torch.testing.assert_close(y[left] * (1 - p), x[left])
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    ("clip_norm", "algorithm"),
    [
        (None, fx.scaffold()),
        (0.05, fx.fedexp()),
        (0.05, fx.fedprox(mu=0.3)),
        (1e4, fx.scaffold()),
    ],
    ids=lambda each: each.name if isinstance(each, fx.Algorithm) else f"clip {each}",
)
def test_a_step_in_parts_gives_the_same_bits(
    clip_norm: float | None, algorithm: fx.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = []
    for least in (0, 2**60):  # bytes of a model that takes its steps in parts
        monkeypatch.setattr(loop, "LARGE_BYTES", least)
        task = task_of(lambda: network().float())
        fields = {"x": task.train.fields["x"].float(), "y": task.train.fields["y"]}
        local = replace(task.local, clip_norm=clip_norm)
        train = Federation(fields, task.train.offsets)
        run = replace(task, train=train, local=local)
        params += [last(run, algorithm, "loop").params, last(run, algorithm, "threads").params]
    assert torch.equal(params[0], params[2])
    assert torch.equal(params[1], params[3])


class Doubled(ModuleObjective):
    """Overrides the gradient alone."""

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        grad, buffers = super().gradient(params, buffers, batch)
        return 2 * grad, buffers


def test_an_overridden_gradient_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LARGE_BYTES", 0)
    task = task_of(network)
    local = replace(task.local, steps=1, clip_norm=None, weight_decay=0.0)
    plain, doubled = (
        last(replace(task, objective=objective, local=local), fx.fedavg(), "loop").params
        for objective in (ModuleObjective(network), Doubled(network))
    )
    assert not torch.allclose(plain, doubled)


@pytest.mark.parametrize(("window", "stride"), [(2, 2), (3, 1)], ids=["apart", "overlapping"])
def test_the_layout_of_a_gradient_changes_no_number(window: int, stride: int) -> None:
    pool, dropout = nn.MaxPool2d(window, stride), SeededDropout(0.0)
    x = torch.randn(4, 8, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    grads: list[Tensor] = []
    strides: list[tuple[int, ...]] = []
    for hooked in (False, True):
        if hooked:
            for layer in (pool, dropout):
                layer.register_forward_hook(keep_channels_last)
        y = pool(x)
        y.register_hook(lambda grad: strides.append(grad.stride()))
        out = dropout(y).flatten(1)
        grads += torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), x)
    assert torch.equal(*grads)
    assert strides[0][1] != 1
    assert strides[1][1] == 1


def test_a_client_that_fails_leaves_no_thread_at_work() -> None:
    pool, done = Pool(), []

    def function(item: int) -> int:
        if item == 2:
            raise ValueError("client 2")
        done.append(item)
        return item

    results = pool.map_parts(function, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert next(results) == [0, 1]
    with pytest.raises(ValueError, match="client 2"):
        list(results)
    assert torch.get_num_threads() == 2
    assert pool.map(function, [8, 9]) == [8, 9]
    assert not {6, 7} & set(done)  # the part after the next was not started


def test_the_other_clients_of_a_failed_part_are_waited_for() -> None:
    pool, began, done = Pool(), Event(), list[int]()

    def function(item: int) -> None:
        if item == 0:
            began.wait()
            raise ValueError("client 0")
        began.set()
        sleep(0.2)
        done.append(item)

    with pytest.raises(ValueError, match="client 0"):
        pool.map(function, [0, 1])
    assert done == [1]
