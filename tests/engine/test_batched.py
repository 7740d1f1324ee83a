"""The batched engine gives what the loop gives, round by round, by both of its implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine import EngineName, batched, plan
from fedexp.engine.batched import Batched
from fedexp.engine.loop import Loop
from fedexp.engine.plan import CohortPlan, Work
from fedexp.objective import ModuleObjective
from fedexp.precision import Precision
from fedexp.tasks import Task
from tests.engine.helpers import (
    EXACT,
    assert_agree,
    assert_same_state,
    double_batch_norm,
    images,
    run_rounds,
    unequal,
    work_of,
)
from tests.helpers.problems import dropout_net, least_squares
from tests.helpers.rules import ALGORITHMS, rule_id


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


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_both_implementations_are_the_loop(algorithm: fx.Algorithm) -> None:
    """Stacked layers with their step layer by layer, here in plain PyTorch, and vmap."""
    for task in (images(), unequal()):
        loop = run_rounds(Loop(), task, algorithm)
        for engine in (Batched("layers"), Batched("vmap")):
            for one, other in zip(loop, run_rounds(engine, task, algorithm), strict=True):
                assert_same_state(one.state, other.state)
                assert one.metrics.keys() == other.metrics.keys()


@dataclass(frozen=True)
class Halved(fx.ClientRule):
    """A correction that is not declared to be linear."""

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, broadcast: object, client_state: object
    ) -> Tensor:
        return grad / 2


def engine_of(task: Task, algorithm: fx.Algorithm, name: EngineName = "batched") -> str:
    return next(fx.simulate(task, algorithm, 1, engine=name)).engine


def test_layers_are_for_linear_rules() -> None:
    assert engine_of(images(), fx.fedexp()) == "batched (layers)"
    assert engine_of(images(), fx.Algorithm(client=Halved())) == "batched (vmap)"


def test_zeros_behind_the_parameters_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded on a GPU; here to a multiple that fits no model."""
    monkeypatch.setattr(ModuleObjective, "row_multiple", lambda self: 7)
    for task in (images(), unequal(), unequal(double_batch_norm, (7, 7, 7))):
        assert_agree(task, fx.scaffold_exp(), cohort=3)
        local = replace(task.local, momentum=0.9, keep_state=True)
        assert_agree(task, fx.fedexp(), cohort=3, local=local)


class Scaled(nn.Module):
    """A weight that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.layer(x)
        return out


class LooksInside(nn.Module):
    """Uses a layer's weight without calling the layer: stacked, it has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight)


class TiesRows(nn.Module):
    """Reshapes examples into each other: right for one client, wrong for a stack of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out - out.flip(0).detach()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Scaled, "batched (vmap)"),
        (LooksInside, "batched (vmap)"),
        (TiesRows, "batched (vmap, not padded)"),
    ],
)
def test_models_that_cannot_be_stacked_are_batched_by_vmap(
    build: Callable[[], nn.Module], name: str
) -> None:
    task = unequal(lambda: build().double())
    assert_agree(task, fx.fedexp(), cohort=3)
    assert engine_of(task, fx.fedexp()) == name


@pytest.mark.parametrize("sizes", [(7, 7, 7), (4, 9, 30, 2)])
def test_batch_norm(sizes: tuple[int, ...]) -> None:
    """Batches of other lengths run in groups: padding would enter the statistics."""
    local = fx.LocalTraining(lr=0.05, steps=4, batch_size=7)
    assert_agree(unequal(double_batch_norm, sizes), fx.fedexp(), local=local)


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
    assert_agree(task, fx.fedavg())
    one, again = (list(fx.simulate(task, fx.fedavg(), 3, engine="loop"))[-1] for _ in range(2))
    assert torch.equal(one.state.params, again.state.params)
    assert torch.equal(one.state.buffers.averaged, again.state.buffers.averaged)
    assert build is Centred or one.state.buffers.averaged.any()


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


@pytest.mark.parametrize("batch_size", [6, None])
@pytest.mark.parametrize("augment", ["example", "batch", None])
def test_augmentation(augment: str | None, batch_size: int | None) -> None:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8))
    fields = {"x": pixels, "y": torch.from_numpy(rng.integers(0, 3, 40))}
    task = fx.tasks.classification(
        "pixels",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)),
        Federation(fields, np.array([0, 9, 30, 40])),
        transform=Images((0.5,), (0.25,), augment, pad=2),  # type: ignore[arg-type]
        local=fx.LocalTraining(lr=0.05, steps=4, batch_size=batch_size),
    )
    loop, batched = (
        [r.state.params for r in fx.simulate(task, fx.fedexp(), 4, engine=engine)]
        for engine in ("loop", "batched")
    )
    for one, other in zip(loop, batched, strict=True):  # float32: 1e-7 per term
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
    distance = (loop - task.objective.initial(0)[0]).norm()
    assert (loop - batched).norm() < 0.1 * distance
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


def test_training_a_few_clients_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = unequal()
    whole = [r.state.params for r in fx.simulate(task, fx.scaffold_exp(), 3, engine="batched")]
    monkeypatch.setitem(batched.COHORT_BYTES, "cpu", 2 * whole[0].numel() * 8)
    parts = [r.state.params for r in fx.simulate(task, fx.scaffold_exp(), 3, engine="batched")]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_out_of_memory_halves_the_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = Batched.run_clients

    def tight(self, work, state, clients):  # type: ignore[no-untyped-def]
        tried.append(len(clients))
        if len(clients) > 2:
            raise torch.OutOfMemoryError("no more")
        return real(self, work, state, clients)

    monkeypatch.setattr(Batched, "run_clients", tight)
    task = unequal()
    state = fx.SimulationState.initial(task, fx.fedexp(), 0)
    total, _ = Batched()(work_of(task, fx.fedexp()), state)
    assert (tried, int(total.count)) == ([6, 3, 1, 1, 1, 1, 1, 1], 6)


def accuracies(
    precision: Precision, algorithm: fx.Algorithm
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    task = fx.tasks.digits_mlp()
    records = fx.simulate(task, algorithm, 40, 10, precision=precision, engine="batched")
    return np.array([record.test_accuracy for record in records], dtype=np.float64)


@pytest.mark.parametrize("algorithm", [fx.fedavg(), fx.fedexp(eps=0.1)], ids=lambda a: a.name)
def test_bf16_reaches_the_accuracy_curve_of_float32(algorithm: fx.Algorithm) -> None:
    """Of 359 test examples one is 0.3 %; means over ten rounds must not differ by 1 %."""
    exact, rounded = (accuracies(p, algorithm) for p in ("float32", "bf16"))
    assert not np.array_equal(exact, rounded)  # it does compute in another precision
    apart = (rounded - exact).reshape(-1, 10).mean(axis=1)
    assert np.abs(apart).max() < 0.01
    assert rounded[-10:].mean() > 0.9


class Counting(nn.Module):
    """A model of vectors with a floating-point and a whole number that every forward changes."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + self.layer.weight.mean().detach()
            self.calls = self.calls + 1
        out: Tensor = self.layer(x)
        return out


EPOCHS = fx.LocalTraining(lr=0.1, epochs=3, batch_size=4)  # 3, 30, 15, 6, 3 and 21 steps
PADDED_LOCALS = [
    EPOCHS,
    replace(EPOCHS, clip_norm=0.05, weight_decay=0.1),
    replace(EPOCHS, momentum=0.9),
    replace(EPOCHS, momentum=0.5, nesterov=True, weight_decay=0.1),
    replace(EPOCHS, optimizer="adam", lr=0.01),
    replace(EPOCHS, optimizer="adamw", lr=0.01, weight_decay=0.1, clip_norm=0.1),
    replace(EPOCHS, optimizer="delta-sgd", lr=0.1, clip_norm=0.5),
    replace(EPOCHS, step_schedule="cosine"),
    replace(EPOCHS, batch_size=None),
    replace(EPOCHS, batch_size=24),  # more than some cohorts have
]


def assert_padded_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, task: Task, algorithm: fx.Algorithm, *engines: Batched
) -> int:
    """Compare rounds with the loop's where plans are padded as on a GPU; return the padded steps.

    A round runs with rows that are computed on the host and, captured, on the device.
    """
    loop, padded = run_rounds(Loop(), task, algorithm), 0

    def plan_cohort(work: Work, clients: Sequence[int], is_stepped: bool = False) -> CohortPlan:
        nonlocal padded
        with monkeypatch.context() as patch:
            patch.setattr(Federation, "device", property(lambda _: torch.device("cuda")))
            found = plan.plan_cohort(work, clients, is_stepped)
        padded += int((found.lengths == 0).all(axis=1).sum())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(batched, "plan_cohort", plan_cohort)
        for engine in engines:
            for graphs in (False, True):
                engine.graphs, engine.capture = graphs, lambda program, *_: program
                for one, other in zip(loop, run_rounds(engine, task, algorithm), strict=True):
                    assert_same_state(one.state, other.state)
    return padded


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_steps_without_any_client_change_nothing(
    algorithm: fx.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(unequal(), local=EPOCHS)
    engines = Batched("layers"), Batched("vmap"), Batched("vmap", padded=False)
    assert assert_padded_steps_change_nothing(monkeypatch, task, algorithm, *engines)


@pytest.mark.parametrize("local", PADDED_LOCALS, ids=str)
@pytest.mark.parametrize("build", [None, Counting])
def test_steps_without_any_client_in_every_kind_of_local_training(
    local: fx.LocalTraining, build: type[nn.Module] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = unequal() if build is None else unequal(lambda: build().double())
    algorithm = fx.scaffold_exp() if local.is_sgd else fx.fedexp()
    engines = [Batched("vmap"), Batched("vmap", padded=False)]
    if build is None and local.is_plain_sgd:
        engines.append(Batched("layers"))
    task = replace(task, local=local)
    padded = assert_padded_steps_change_nothing(monkeypatch, task, algorithm, *engines)
    assert padded or local.batch_size != 4


def test_steps_without_any_client_of_batch_norm_and_augmentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm = replace(unequal(double_batch_norm, (4, 40, 18, 7, 20)), local=EPOCHS)
    engine = Batched("vmap", padded=False)
    assert assert_padded_steps_change_nothing(monkeypatch, norm, fx.fedexp(), engine)
    pictures = images()
    sizes = np.array([0, 18, 27, 31, 34])  # 35, 21, 7 and 7 steps
    train = Federation(pictures.train.fields, sizes)
    local = replace(pictures.local, steps=None, epochs=7, batch_size=4)
    pictures = replace(pictures, train=train, local=local)
    engines = Batched("layers"), Batched("vmap")
    assert assert_padded_steps_change_nothing(monkeypatch, pictures, fx.scaffold(), *engines)
