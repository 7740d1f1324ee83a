"""The trial is not deceived by chance, by noise or by too few examples.

Each model or rule here once trained to weights other than the loop's without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine import Record
from fedexp.engine.base import Sums
from fedexp.engine.loop import Loop
from fedexp.engine.plan import CohortRule, Work
from fedexp.engine.select import SMALL_MODEL
from fedexp.engine.spot_check import check_client
from fedexp.engine.trial import DisagreementError, Trial, Trials
from fedexp.errors import EngineError, EngineWarning, UsageError
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task

SIZES = (7, 10, 3, 6)
ROUNDING = 1e-5  # float32, three rounds of a few steps


def examples(sizes: tuple[int, ...], sort: bool = False) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    y = torch.randint(0, 3, (sum(sizes),), generator=draw)
    if sort:
        y = torch.cat([part.sort().values for part in y.split(sizes)])
    return torch.randn(len(y), 6, generator=draw) + y[:, None], y


def run(build: Any, engine: str = "auto", **more: Any) -> tuple[Task, Record]:
    """Three rounds; `more` are the loss, the client rule, sizes, the batch size and labels."""
    sizes = more.get("sizes", SIZES)
    x, y = more.get("data") or examples(sizes, more.get("sort", False))
    local = fx.LocalTraining(lr=0.2, epochs=2, batch_size=more.get("batch", 4))
    objective = ModuleObjective(build, more.get("loss"), more.get("classifies", True))
    task = Task("t", objective, Federation({"x": x, "y": y}, np.cumsum([0, *sizes])), local)
    algorithm = fx.Algorithm("a", client=more.get("rule", fx.SGD()))
    options: dict[str, Any] = {"engine": engine}
    *_, last = fx.simulate(task, algorithm, 3, seed=3, **options)
    return task, last


def off(build: Any, **more: Any) -> float:
    """How far `auto` is from the loop, relative to the distance the weights moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        task, auto = run(build, "auto", **more)
    _, loop = run(build, "loop", **more)
    distance = loop.state.params - task.objective.initial(3)[0]
    return float((auto.state.params - loop.state.params).norm() / distance.norm())


class Two(nn.Module):
    """Two dense layers with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(torch.relu(self.first(x))))
        return out


class NoiseAndMixing(Two):
    def between(self, h: Tensor) -> Tensor:
        if self.training:
            h = h + 0.5 * torch.randn_like(h)
            h = h - 0.5 * h.mean(0)
        return h


class OnlyInFloat32(Two):
    def between(self, h: Tensor) -> Tensor:
        mixes = h.dtype == torch.float32 and self.training
        return h - 0.3 * h.mean(0) if mixes else h


class LongBatches(Two):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) >= 8 else h


@pytest.mark.parametrize("build", [NoiseAndMixing, OnlyInFloat32])
def test_what_makes_two_runs_of_the_loop_differ_widens_no_limit(build: type[nn.Module]) -> None:
    assert off(build) <= ROUNDING


def hardest(output: Tensor, y: Tensor) -> Tensor:
    """The largest sixteen losses of a batch count, where there are so many."""
    losses = F.cross_entropy(output, y, reduction="none")
    bound = losses.detach().topk(min(16, len(losses))).values[-1]
    return losses * (losses.detach() >= bound)


def ranking(output: Tensor, y: Tensor) -> Tensor:
    """Pairs of unlike labels alone have a loss."""
    unlike = (y[:, None] != y).to(output.dtype)
    return (unlike * torch.sigmoid(output[:, :1] - output[:, 0]) * (y[:, None] > y)).sum(1)


def test_batches_are_those_of_the_run() -> None:
    sizes = (40, 33, 20, 60)
    assert off(Two, loss=hardest, sizes=sizes, batch=32) <= ROUNDING
    assert off(LongBatches, sizes=sizes, batch=32) <= ROUNDING


def test_sorted_labels_hide_nothing() -> None:
    sizes = (30, 24, 36, 27)
    assert off(Two, loss=ranking, sizes=sizes, batch=8, sort=True) <= ROUNDING


@dataclass(frozen=True)
class ClipByNorm(fx.ClientRule):
    """Looks at all of a client's gradient."""

    bound: float = 2.0

    def correct(self, grad: Tensor, *more: Any) -> Tensor:
        return grad * (self.bound / grad.norm()).clamp(max=1.0)


@dataclass(frozen=True)
class Noisy(fx.ClientRule):
    def correct(self, grad: Tensor, *more: Any) -> Tensor:
        return grad + 0.1 * torch.randn_like(grad)


@pytest.mark.parametrize("rule", [ClipByNorm(0.3), ClipByNorm(4.0), Noisy()], ids=str)
def test_rules_of_the_users_own_see_one_client(rule: fx.ClientRule) -> None:
    assert off(Two, rule=rule) <= ROUNDING


def test_parameters_in_bf16_hide_no_mixing() -> None:
    x, y = examples(SIZES)
    build: Callable[[], nn.Module] = lambda: MixingInTraining().to(torch.bfloat16)  # noqa: E731
    assert off(build, data=(x.bfloat16(), y)) < 0.05  # bf16 itself; mixing made it 0.12


class MixingInTraining(Two):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.training else h


# Copies, buffers and losses --------------------------------------------------------------------


class Scaled(nn.Module):
    """An attribute that is a function of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))
        self.act = lambda h: h * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))  # type: ignore[no-untyped-call]


def test_functions_in_attributes_are_followed() -> None:
    task, last = run(Scaled)
    assert isinstance(task.objective, ModuleObjective)
    scale = task.objective.load(last.state.params, last.state.buffers).scale
    assert isinstance(scale, Tensor)
    assert (scale - 1).abs().max() > 1e-3
    with pytest.raises(UsageError, match="pass a function that builds it"):
        run(Scaled())


class Rotating(nn.Module):
    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("turns", torch.exp(1j * torch.arange(3.0)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.turns).real


class RunningMaximum(nn.Module):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("largest", torch.full((6,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().amax(0))
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_complex_buffers_stay_whole_and_infinite_ones_may_become_finite(engine: str) -> None:
    task, last = run(Rotating, engine)
    assert isinstance(task.objective, ModuleObjective)
    turns = task.objective.load(last.state.params, last.state.buffers).turns
    assert torch.equal(turns, Rotating().turns)  # type: ignore[arg-type]
    _, last = run(RunningMaximum, engine)
    assert last.state.buffers.averaged.isfinite().all()


class SometimesInPlace(Two):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 8:
            x.mul_(1.1)
        return super().forward(x)


def test_the_data_of_the_user_are_never_written_to() -> None:
    data = examples(SIZES)
    before = data[0].clone()
    run(SometimesInPlace, "loop", data=data, batch=None)
    assert torch.equal(data[0], before)


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(output, y, reduction="none")


def test_losses_with_weights_are_refused() -> None:
    with pytest.raises(UsageError, match="weights of its own"):
        run(Two, loss=WithWeights())
    model = Two()
    penalty = lambda o, y: F.cross_entropy(o, y, reduction="none") + model.last.weight.sum()  # noqa: E731
    with pytest.raises(UsageError, match="refers to a model's"):
        run(Two, loss=penalty)


def test_labels_of_one_column_are_compared_one_by_one() -> None:
    x, y = examples(SIZES)
    squeezed = lambda o, t: F.cross_entropy(o, t[:, 0], reduction="none")  # noqa: E731
    _, column = run(Two, "loop", data=(x, y[:, None]), loss=squeezed)
    _, plain = run(Two, "loop", data=(x, y))
    assert column.train_accuracy == plain.train_accuracy


def test_a_model_that_ignores_its_parameters_is_refused() -> None:
    other = Two()

    class Elsewhere(Two):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = other(x)
            return out

    with pytest.raises(UsageError, match="does not depend on any parameter"):
        run(Elsewhere, "loop")


# Draws -------------------------------------------------------------------------------------------


class Large(nn.Module):
    """A convolutional network that takes the threads engine, with a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.conv = nn.Dropout(0.3), nn.Conv1d(1, 4, 3)
        self.wide, self.last = nn.Linear(16, SMALL_MODEL // 16), nn.Linear(SMALL_MODEL // 16, 3)

    def dropped(self, h: Tensor) -> Tensor:
        out: Tensor = self.drop(h)
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x[:, None]).relu().flatten(1)
        out: Tensor = self.last(self.dropped(self.wide(h).relu()))
        return out


class ByItsP(Large):
    def dropped(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.drop.p, self.training)


class InCheckpoint(Large):
    def dropped(self, h: Tensor) -> Tensor:
        return checkpoint(self.drop, h, use_reentrant=False)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_dropout_that_threads_would_share_takes_the_loop() -> None:
    assert run(Large)[1].engine == "threads"
    for build, why in ((ByItsP, "draws random numbers"), (InCheckpoint, "backward pass")):
        with pytest.warns(EngineWarning, match=why):
            _, last = run(build)
        assert last.engine == "loop"


class NoiseInEvaluation(Two):
    def between(self, h: Tensor) -> Tensor:
        return h if self.training else h + 0.1 * torch.randn_like(h)


def test_evaluation_and_trial_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    losses = [run(NoiseInEvaluation)[1].train_loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_named_engine_raises_with_its_distance_from_the_loop() -> None:
    with pytest.raises(UsageError, match=r"off by \d.*engine='loop'"):
        run(lambda: nn.Sequential(nn.Embedding(9, 6, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3)),
            "batched", data=(torch.arange(52).view(26, 2) % 9, examples(SIZES)[1]))  # fmt: skip


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="engine is one of auto, loop, threads, batched"):
        run(Two, "fast")


class Ahead(Loop):
    """Looks at the cohort of the next round, as engines do that plan ahead."""

    def __call__(self, work: Work, state: fx.SimulationState) -> Sums:
        assert (work.after().cohort < work.task.train.clients).all()
        return super().__call__(work, state)


def test_a_trial_has_cohorts_of_its_own() -> None:
    """Its federation is smaller than the cohort of the run."""
    x, y = examples((5,) * 8)
    train = Federation({"x": x, "y": y}, np.arange(9) * 5)
    task = fx.classification("t", lambda: nn.Linear(6, 3), train, cohort=6)
    rule = CohortRule.of(6, train.clients)
    algorithm = fx.fedexp()
    work = Work(task, algorithm, task.local, "uniform", 0, 1, rule.sample(0, 1, train), rule)
    state = fx.SimulationState.initial(task, algorithm, 0)
    Trials(work, state, "float32").check(lambda work: Ahead())


@dataclass(frozen=True)
class Forgetful(Loop):
    """Starts a client with one of its optimiser's numbers at zero."""

    forgotten: str

    def __call__(self, work: Work, state: fx.SimulationState) -> Sums:
        states = {c: dict(each) for c, each in state.clients.items()}
        for each in states.values():
            each[f"optimizer.{self.forgotten}"] = 0 * each[f"optimizer.{self.forgotten}"]
        return super().__call__(work, replace(state, clients=states))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_long_warm_up_leaves_steps_that_can_be_compared(schedule: Any) -> None:
    """Those of the first round are a thousandth of the others, and nearly alike."""
    x, y = examples(SIZES)
    train = Federation({"x": x, "y": y}, np.cumsum([0, *SIZES]))
    local = fx.LocalTraining(
        steps=4, step_schedule=schedule, step_schedule_over="run", warmup_steps=4000
    )
    task = fx.classification("t", Two, train, local=local)
    state, tried = fx.SimulationState.initial(task, fx.fedavg(), 0), list[list[float]]()
    work = Work(task, fx.fedavg(), local, "uniform", 0, 1, np.arange(4), CohortRule(), 9000)

    def make(work: Work) -> Loop:
        tried.append(work.step_factors(3))
        return Loop()

    Trials(work, state, "float32").check(make)
    assert tried[0][:2] == [0.5, 1.0]
    assert next(fx.simulate(task, fx.fedavg(), 9000, engine="batched")).engine == "batched (vmap)"


@pytest.mark.parametrize("forgotten", ["first", "second", "steps"])
def test_an_engine_that_forgets_state_that_is_kept_is_found(forgotten: str) -> None:
    """By the trial, before the first round, and by a spot check, in a later one."""
    x, y = examples(SIZES)
    train = Federation({"x": x, "y": y}, np.cumsum([0, *SIZES]))
    local = fx.diloco_local(lr=0.01, steps=4, batch_size=3, warmup_steps=6)
    task = fx.classification("t", Two, train, local=local)
    state = fx.SimulationState.initial(task, fx.diloco(), 0)
    rule = CohortRule()
    work = Work(task, fx.diloco(), local, "uniform", 0, 1, np.arange(4), rule, 8)
    trials = Trials(work, state, "float32")
    trials.check(lambda _: Loop())
    with pytest.raises(DisagreementError):
        trials.check(lambda _: Forgetful(forgotten))
    *_, record = fx.simulate(task, fx.diloco(), 8, engine="loop")
    later = replace(work, round=8), record.state
    check_client(*later, 1, "float32", lambda _: Loop())
    with pytest.raises(EngineError, match="gives client 1 an update that is off"):
        check_client(*later, 1, "float32", lambda _: Forgetful(forgotten))


@pytest.mark.parametrize(
    ("distances", "agrees"),
    [([0.01], True), ([0.01, 0.01], True), ([0.01] * 3, False), ([0.5], False)],
)
def test_small_errors_in_the_precision_of_a_run_are_tried_again(
    distances: list[float], agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding that flips a sign before a ReLU makes a small error; a wrong kernel a large one."""
    x, y = examples(SIZES)
    train = Federation({"x": x, "y": y}, np.cumsum([0, *SIZES]))
    task = Task("t", ModuleObjective(lambda: nn.Linear(6, 3)), train, fx.LocalTraining(lr=0.1))
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)
    work = Work(task, fx.fedavg(), task.local, "uniform", 0, 1, np.arange(4), CohortRule(), 1)
    left, starts = list(distances), []

    def check(trial: Trial, make: Callable[[Work], Any]) -> float:
        if not trial.plain:
            starts.append(trial.state.params)
            if left:
                raise DisagreementError("engine", left.pop(0), 1e-3)
        return original(trial, make)

    original = Trial.check
    monkeypatch.setattr(Trials, "_is_special", True)
    monkeypatch.setattr(Trial, "check", check)
    trials = Trials(work, state, "float32")
    if agrees:
        trials.check(lambda _: Loop())
        assert len(starts) == len(distances) + 1
        assert not torch.equal(starts[0], starts[1])
    else:
        with pytest.raises(DisagreementError, match="off by"):
            trials.check(lambda _: Loop())
