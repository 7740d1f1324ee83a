"""Local optimisers against torch.optim, schedules, and which engines take them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.client import Tensors
from fedexp.engine.batched import Batched
from fedexp.errors import DataNote
from fedexp.local import clip_factor, init_moments, optimizer_step
from fedexp.options import Setup
from tests.engine.helpers import EXACT, assert_agree, assert_same_state, run_rounds, unequal
from tests.helpers.problems import least_squares

Local = fx.LocalTraining
TWINS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "momentum": (
        {"momentum": 0.9, "weight_decay": 0.01},
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        {"momentum": 0.8, "nesterov": True},
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.8, nesterov=True),
    ),
    "adam": (
        {"optimizer": "adam", "weight_decay": 0.1, "betas": (0.8, 0.95)},
        lambda params, lr: torch.optim.Adam(params, lr, (0.8, 0.95), weight_decay=0.1),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1, "adam_eps": 1e-4},
        lambda params, lr: torch.optim.AdamW(params, lr, eps=1e-4, weight_decay=0.1),
    ),
}
SCHEDULED = {"step_schedule": "linear"}


def halved(step: int, steps: int) -> float:
    return 1.0 if step < steps / 2 else 0.5


@pytest.mark.parametrize("name", TWINS)
def test_steps_are_those_of_torch_optim(name: str) -> None:
    options, make = TWINS[name]
    local, draw = Local(lr=0.05, **options), torch.Generator().manual_seed(0)
    start = torch.randn(3, 7, generator=draw, dtype=torch.float64)  # of three clients
    twins = [nn.Parameter(row.clone()) for row in start]
    optimizers = [make([twin], local.lr) for twin in twins]
    params, moments = start, init_moments(start, local)
    for step in range(1, 8):
        grads = torch.randn(3, 7, generator=draw, dtype=torch.float64)
        number = step if step % 2 else torch.tensor(float(step), dtype=torch.float64)
        params, moments = optimizer_step(params, grads, moments, number, local.lr, local)
        for twin, grad, optimizer in zip(twins, grads, optimizers, strict=True):
            twin.grad = grad.clone()
            optimizer.step()
        torch.testing.assert_close(params, torch.stack(list(twins)).data, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TWINS)
def test_a_function_of_torch_optim_trains_as_its_name_does(name: str) -> None:
    """With clipping, which comes first; the state of the optimiser starts anew in every round."""
    options, make = TWINS[name]
    named = Local(lr=0.02, steps=5, batch_size=8, clip_norm=0.5, **options)
    own = Local(lr=0.02, steps=5, batch_size=8, clip_norm=0.5, optimizer=make)
    runs = [
        list(fx.simulate(unequal(), fx.fedexp(), 3, 3, local=local, engine="loop"))
        for local in (named, own)
    ]
    for one, other in zip(*runs, strict=True):
        assert_same_state(one.state, other.state)


def test_a_client_that_is_written_out_by_hand() -> None:
    task, local = unequal(), Local(lr=0.1, steps=4, batch_size=None, momentum=0.9, clip_norm=0.3)
    local = replace(local, weight_decay=0.05, step_schedule=halved)
    record = next(fx.simulate(task, fx.fedavg(), 1, [3], local=local, engine="loop"))
    w, buffers = task.objective.initial(0)
    start, m = w, torch.zeros_like(w)
    for step in range(4):
        grad = task.objective.gradient(w.clone(), buffers, task.train.client(3))[0]
        m = 0.9 * m + grad * clip_factor(grad, 0.3) + 0.05 * w
        w = w - 0.1 * halved(step, 4) * m
    torch.testing.assert_close(record.state.params, w, **EXACT)
    assert (w - start).norm() > 0.01


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize(
    "more", [{}, SCHEDULED, {"step_schedule": halved}], ids=["plain", "named", "function"]
)
def test_engines_agree(name: str, more: dict[str, Any]) -> None:
    options = {**TWINS[name][0], **more, "clip_norm": 0.5}
    local = Local(lr=0.02, epochs=2, batch_size=8, **options)
    for engine in ("batched", "threads"):
        assert_agree(unequal(), fx.fedexp(), engine, cohort=4, local=local)


@pytest.mark.parametrize("more", [SCHEDULED, {"step_schedule": halved}], ids=["named", "function"])
def test_scaffold_divides_by_the_sum_of_the_step_sizes(more: dict[str, Any]) -> None:
    local = Local(lr=0.05, epochs=2, batch_size=8, **more)
    for engine in ("batched", "threads"):
        assert_agree(unequal(), fx.scaffold_exp(), engine, cohort=4, local=local)
    quick = Local(lr=0.05, steps=2, batch_size=None, **more)
    task = least_squares()
    state = next(fx.simulate(task, fx.scaffold(), 1, local=quick, engine="loop")).state
    w, buffers = task.objective.initial(0)
    first = task.objective.gradient(w, buffers, task.train.client(1))[0]
    factors = quick.step_factors(2)
    second = task.objective.gradient(w - 0.05 * factors[0] * first, buffers, task.train.client(1))
    mean = (factors[0] * first + factors[1] * second[0]) / sum(factors)
    torch.testing.assert_close(state.clients[1]["control"], mean, **EXACT)


def test_a_whole_round_as_one_program_has_the_same_steps() -> None:
    for options in (
        TWINS["adam"][0],
        SCHEDULED,
        {"momentum": 0.9, "step_schedule": halved},
        DELTA,
    ):
        task = unequal()
        task = replace(task, local=replace(task.local, **options))
        one = run_rounds(Batched(graphs=False), task, fx.fedexp())
        whole = Batched(graphs=True, capture=lambda program, inputs, warm_up: program)
        for plain, other in zip(one, run_rounds(whole, task, fx.fedexp()), strict=True):
            assert_same_state(plain.state, other.state)
        assert whole.cuda_graph == "round"


DELTA: dict[str, Any] = {"optimizer": "delta-sgd", "weight_decay": 0.01}


def test_delta_sgd_by_hand() -> None:
    """Three clients, each with norms of its own, beside numpy and its measured distances."""
    local, draw = Local(lr=0.2, **DELTA), torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, generator=draw, dtype=torch.float64)
    curvature = torch.rand(3, 7, generator=draw, dtype=torch.float64) * 8
    w, last, g_last, eta, theta = x.numpy().copy(), None, None, np.full(3, 0.2), np.ones(3)
    params, moments = x, init_moments(x, local)
    bounds = set()
    for step in range(1, 9):
        g = curvature.numpy() * w + 0.01 * w
        if last is not None:
            smooth = np.linalg.norm(w - last, axis=1) / np.linalg.norm(g - g_last, axis=1)
            grown = np.sqrt(1 + 0.1 * theta) * eta
            bounds |= set((smooth < grown).tolist())
            theta, eta = np.minimum(smooth, grown) / eta, np.minimum(smooth, grown)
        last, g_last, w = w, g, w - eta[:, None] * g
        params, moments = optimizer_step(params, curvature * params, moments, step, 0.2, local)
        np.testing.assert_allclose(params.numpy(), w, rtol=1e-11)
        np.testing.assert_allclose(moments["rate"].squeeze(1).numpy(), eta, rtol=1e-11)
    assert bounds == {True, False}  # both bounds were active


def test_delta_sgd_finds_the_smoothness_of_a_quadratic() -> None:
    """With γ = 2 the bound is 1 / L, whatever the first step size, and one step then suffices."""
    local, smoothness = Local(optimizer="delta-sgd"), 5.0
    params = torch.tensor([1.0, -2.0], dtype=torch.float64)
    moments = init_moments(params, local)
    for step in (1, 2):
        params, moments = optimizer_step(params, smoothness * params, moments, step, 0.3, local)
    assert moments["rate"].item() == pytest.approx(1 / smoothness)
    assert params.norm() < 1e-12
    params, moments = optimizer_step(params * 0, params * 0, moments, 3, 0.3, local)
    assert moments["rate"].isfinite().all()  # also where the gradient is zero


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.5}], ids=["plain", "clipped"])
def test_engines_agree_on_delta_sgd(more: dict[str, Any]) -> None:
    local = Local(lr=0.2, epochs=2, batch_size=8, **DELTA, **more)
    for engine in ("batched", "threads"):
        assert_agree(unequal(), fx.fedexp(), engine, cohort=4, local=local)
    *_, record = fx.simulate(unequal(sizes=(17,) * 6), fx.fedavg(), 3, local=local)
    assert record.engine.startswith("batched")


@pytest.mark.parametrize("make", [fx.scaffold, fx.scaffold_exp, fx.fednova])
@pytest.mark.parametrize("options", [TWINS["momentum"][0], TWINS["adam"][0], DELTA], ids=str)
def test_rules_that_need_sgd_refuse_other_optimisers(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(fx.UsageError, match=r"Adam and delta-sgd are not; use local.optimizer sgd"):
        fx.simulate(unequal(), make(), 1, local=Local(**options))
    with pytest.raises(fx.UsageError, match="takes local updates for sums of gradients"):
        fx.simulate(unequal(), make(), 1, local=Local(optimizer=TWINS["adam"][1]))


def test_engines_of_plain_sgd_take_nothing_else() -> None:
    dense = unequal(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double())
    assert next(fx.simulate(dense, fx.fedexp(), 1)).engine == "dense"
    kept, warmed = {**TWINS["adam"][0], "keep_state": True}, {"warmup_steps": 3}
    for options in (TWINS["momentum"][0], TWINS["adam"][0], SCHEDULED, kept, warmed):
        local = replace(dense.local, **options)
        assert next(fx.simulate(dense, fx.fedexp(), 1, local=local)).engine.startswith("batched")
        with pytest.raises(fx.UsageError, match="the local optimiser"):
            next(fx.simulate(dense, fx.fedexp(), 1, local=local, engine="dense"))
    squares = least_squares()
    assert next(fx.simulate(squares, fx.fedexp(), 1)).engine == "quadratic"
    for options in ({"momentum": 0.5}, {"momentum": 0.5, "keep_state": True}, {"warmup_steps": 2}):
        local = replace(squares.local, **options)
        assert next(fx.simulate(squares, fx.fedexp(), 1, local=local)).engine == "loop"
        with pytest.raises(fx.UsageError, match=r"'quadratic' cannot be used.*local optimiser"):
            next(fx.simulate(squares, fx.fedexp(), 1, local=local, engine="quadratic"))


def test_a_function_runs_in_the_loop_and_in_threads_only() -> None:
    local = Local(lr=0.01, steps=3, optimizer=lambda p, lr: torch.optim.RMSprop(p, lr))
    assert next(fx.simulate(unequal(), fx.fedexp(), 1, local=local)).engine == "loop"
    assert_agree(unequal(), fx.fedexp(), "threads", local=local)
    with pytest.raises(fx.UsageError, match=r"'batched' cannot be used.*the local optimiser"):
        next(fx.simulate(unequal(), fx.fedexp(), 1, local=local, engine="batched"))
    wrong: Any = lambda params, lr: None  # noqa: E731
    with pytest.raises(fx.UsageError, match=r"must return a torch\.optim\.Optimizer"):
        next(fx.simulate(unequal(), fx.fedexp(), 1, local=Local(optimizer=wrong), engine="loop"))


def test_schedules_over_rounds() -> None:
    def lrs(**options: Any) -> list[float]:
        local = Local(lr=0.4, steps=2, **options)
        return [r.local_lr for r in fx.simulate(unequal(), fx.fedavg(), 4, local=local)]

    assert lrs() == [0.4] * 4
    assert lrs(lr_schedule="linear") == pytest.approx([0.4, 0.3, 0.2, 0.1])
    cosine = [0.2 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert lrs(lr_schedule="cosine") == pytest.approx(cosine)
    decayed = lrs(lr_schedule=lambda round: min(1, round / 2), lr_decay=0.5)
    assert decayed == pytest.approx([0.2, 0.2, 0.1, 0.05])
    for engine in ("batched", "threads"):
        local = replace(unequal().local, lr_schedule="cosine", lr_decay=0.9)
        assert_agree(unequal(), fx.scaffold_exp(), engine, cohort=4, local=local)
    with pytest.raises(fx.UsageError, match="needs the number of rounds"):
        Local(lr_schedule="cosine").lr_at(1)
    with pytest.raises(fx.UsageError, match=r"lr_schedule\(1\) must be positive, not 0"):
        next(fx.simulate(unequal(), fx.fedavg(), 1, local=Local(lr_schedule=lambda t: 0.0)))


WARMED: dict[str, Any] = {"step_schedule_over": "run", "warmup_steps": 4}


def test_schedules_over_all_steps_of_the_run() -> None:
    """Steps 6, 7, 8 of 12 are those of the third round, for a client that takes three per round."""
    linear, cosine = (Local(step_schedule=s, **WARMED) for s in ("linear", "cosine"))
    whole = [factor for round in range(1, 5) for factor in linear.step_factors(3, round, 4)]
    assert whole == pytest.approx([0.25, 0.5, 0.75, 1, *(1 - s / 8 for s in range(8))])
    expected = [(1 + math.cos(math.pi * s / 8)) / 2 for s in (2, 3, 4)]
    assert cosine.step_factors(3, 3, 4) == pytest.approx(expected)
    seen: list[tuple[int, int]] = []

    def watched(step: int, steps: int) -> float:
        seen.append((step, steps))
        return 1.0

    Local(step_schedule=watched, step_schedule_over="run").step_factors(3, 2, rounds=4)
    assert seen == [(3, 12), (4, 12), (5, 12)]
    assert Local(warmup_steps=4, step_schedule="linear").step_factors(6, 3, 4) == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1, 0.5]
    )
    assert Local(**WARMED).step_factors(3, 2) == [1, 1, 1]  # needs no number of rounds
    assert Local(step_schedule_over="run", warmup_steps=100).step_factors(2, 3, 4) == [0.05, 0.06]
    with pytest.raises(fx.UsageError, match=r"'run' needs the number of rounds.*use 'round'"):
        linear.step_factors(3, 2)


@pytest.mark.parametrize("client", [fx.SGD(), fx.Scaffold()], ids=str)
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", halved])
def test_engines_agree_on_schedules_over_the_run(client: fx.ClientRule, schedule: Any) -> None:
    warmup = 0 if callable(schedule) else 9
    local = Local(lr=0.1, epochs=2, batch_size=8, step_schedule=schedule, warmup_steps=warmup)
    algorithm = fx.Algorithm("a", client)
    for engine in ("batched", "threads"):
        over_run = replace(local, step_schedule_over="run")
        assert_agree(unequal(), algorithm, engine, cohort=4, local=over_run)


def test_a_step_of_the_run_does_not_depend_on_earlier_rounds() -> None:
    """A state without any round before it, as of a client that takes part for the first time."""
    local = Local(lr=0.1, steps=3, batch_size=None, step_schedule="linear", **WARMED)
    task = unequal()
    state = replace(fx.SimulationState.initial(task, fx.fedavg(), 0), round=2)
    record = next(fx.simulate(task, fx.fedavg(), 4, [1], start=state, local=local, engine="loop"))
    w, buffers = task.objective.initial(0)
    for factor in (0.75, 0.625, 0.5):
        w = w - 0.1 * factor * task.objective.gradient(w.clone(), buffers, task.train.client(1))[0]
    torch.testing.assert_close(record.state.params, w, **EXACT)


def test_total_lr_is_the_sum_of_the_step_sizes() -> None:
    seen: list[float] = []

    class Watched(fx.ClientRule):
        def end_round(
            self, delta: Tensor, total_lr: Tensor | float, broadcast: Tensors, client_state: Tensors
        ) -> tuple[Tensors, Tensors]:
            seen.append(float(total_lr))
            return {}, {}

    local = Local(lr=0.1, steps=4, step_schedule="linear")
    rule = fx.Algorithm("watched", client=Watched())
    next(fx.simulate(unequal(), rule, 1, [2], local=local, engine="loop"))
    assert seen[-1] == pytest.approx(0.1 * (1 + 0.75 + 0.5 + 0.25))
    next(fx.simulate(unequal(), rule, 1, [2], local=Local(lr=0.1, steps=7), engine="loop"))
    assert seen[-1] == 7 * 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "lion"},
            "local.optimizer is sgd, adam, adamw, delta-sgd or a function, .*, not 'lion'",
        ),
        ({"lr": "0.1"}, "local.lr must be a number, not '0.1'"),
        *(
            ({name: None}, f"local.{name} must be a number, not None")
            for name in ("lr", "lr_decay", "weight_decay", "momentum", "delta_gamma", "adam_eps")
        ),
        ({"lr": 10**400}, "local.lr must be > 0"),
        ({"weight_decay": math.inf}, "local.weight_decay must be >= 0, not inf"),
        ({"steps": 20, "epochs": 2}, "local.steps=20 and local.epochs=2 exclude each other"),
        ({"steps": [2]}, "local.steps must be a number"),
        ({"steps": 1.5}, "local.steps must be a whole number: 1.5"),
        ({"momentum": 1.0}, r"local.momentum must be in \[0, 1\)"),
        ({"optimizer": "adam", "momentum": 0.9}, "local.momentum belongs to sgd"),
        ({"nesterov": True}, "local.nesterov needs local.momentum > 0"),
        ({"betas": (0.9, 1.0)}, "local.betas must be two numbers"),
        ({"betas": 0.9}, "local.betas must be two numbers in .*, not 0.9"),
        ({"adam_eps": -1.0}, "local.adam_eps"),
        ({"lr_schedule": "step"}, "local.lr_schedule is constant, linear, cosine or a function"),
        ({"step_schedule": "step"}, "local.step_schedule is constant"),
        ({"delta_growth": 0.0}, "local.delta_growth must be positive"),
        ({"delta_gamma": math.inf}, "local.delta_gamma must be positive and finite"),
        ({"optimizer": "delta-sgd", "momentum": 0.9}, "local.momentum belongs to sgd"),
        ({"optimizer": "delta-sgd", "step_schedule": "linear"}, "leave local.step_schedule out"),
        ({"optimizer": "delta-sgd", "warmup_steps": 3}, "and local.warmup_steps"),
        *(
            ({**options, "keep_state": True}, "keep_state keeps the momentum of sgd or the moments")
            for options in ({}, {"optimizer": "delta-sgd"}, {"optimizer": TWINS["adam"][1]})
        ),
        ({"warmup_steps": -1}, "local.warmup_steps must be at least 0"),
        ({"momentum": 0.9, "keep_state": "yes"}, "local.keep_state is true or false, not 'yes'"),
        ({"warmup_steps": None}, "local.warmup_steps must be a number"),
        ({"warmup_steps": 3, "step_schedule": halved}, "let your local.step_schedule warm up"),
        ({"step_schedule_over": "run"}, "is round, or run with local.step_schedule or local.warm"),
        ({"step_schedule_over": "all", "warmup_steps": 3}, "local.step_schedule_over is round, or"),
        ({"betas": (0.5, 0.9)}, "local.betas belongs to adam and adamw"),
        ({"adam_eps": 1e-3, "momentum": 0.9}, "local.adam_eps belongs to adam and adamw"),
        ({"delta_gamma": 1.0, "optimizer": "adam"}, "local.delta_gamma belongs to delta-sgd"),
        ({"delta_growth": 1.0}, "local.delta_growth belongs to delta-sgd"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        Local(**options)


def test_schedules_must_return_numbers() -> None:
    wrong: Any = lambda round: "fast"  # noqa: E731
    with pytest.raises(fx.UsageError, match=r"lr_schedule\(3\) must be a number, not 'fast'"):
        Local(lr_schedule=wrong).lr_at(3)


def test_twenty_steps_unless_steps_or_epochs_are_given() -> None:
    assert Local() == Local(steps=None) == Local(steps=20)
    assert (Local(epochs=2).steps, Local(epochs=2, batch_size=10).steps_for(25)) == (None, 6)


def test_options_by_name() -> None:
    setup = Setup(fx.fedavg(), Local())
    changed = setup.with_options(
        {"local.optimizer": "adam", "betas": "0.8,0.9", "local.lr_schedule": "cosine"}
    )
    assert changed.local == Local(optimizer="adam", betas=(0.8, 0.9), lr_schedule="cosine")
    with pytest.raises(fx.UsageError, match=r"local.optimizer must be one of sgd, adam, adamw"):
        setup.with_options({"local.optimizer": "lion"})
    options = fx.Experiment("toy", "fedavg", options={"local.momentum": "0.5"}).spec["options"]
    assert (options["local.momentum"], options["local.nesterov"]) == (0.5, False)


def test_a_warm_up_that_never_ends_is_noted() -> None:
    local = fx.LocalTraining(steps=5, warmup_steps=5)
    with pytest.warns(
        DataNote, match=r"local\.warmup_steps=5, but no client takes more than 5 steps"
    ):
        fx.simulate("toy", "fedavg", local=local)
    over = replace(local, step_schedule_over="run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fx.simulate("toy", "fedavg", rounds=2, local=over)
