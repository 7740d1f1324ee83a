"""Reduction identities between server rules, and the edge cases of the step size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fedexp as fx
from tests.helpers.rules import random_updates

PARAMS = torch.linspace(-1, 1, 8)


def trajectory(rule: fx.ServerRule, rounds: int = 5) -> list[torch.Tensor]:
    params, state, visited = PARAMS, rule.init(PARAMS), []
    for seed in range(rounds):
        agg = fx.Aggregate.of(random_updates(4, 8, seed, torch.float32))
        params, state, _ = rule.step(params, agg, state)
        visited.append(params)
    return visited


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (fx.ExP(eps=math.inf), fx.Average(1.0)),
        (fx.ExP(eps=1e30), fx.Average(1.0)),
        (fx.ExP(max_step=1.0), fx.Average(1.0)),
        (fx.Momentum(0.7, beta=0.0), fx.Average(0.7)),
        (fx.Momentum(0.7, beta=0.0, nesterov=True), fx.Average(0.7)),
        (fx.MomentumExP(eps=0.1, beta=0.0), fx.ExP(eps=0.1, clamp=False)),
        (fx.MomentumExP(eps=0.1, beta=0.0, clamp=True), fx.ExP(eps=0.1)),
        (fx.MomentumExP(eps=math.inf, clamp=True), fx.Momentum(1.0, beta=0.9)),
        (fx.Hypergradient(0.7, low=0.7, high=0.7), fx.Average(0.7)),
    ],
    ids=str,
)
def test_rules_agree_bit_for_bit(one: fx.ServerRule, other: fx.ServerRule) -> None:
    assert all(map(torch.equal, trajectory(one), trajectory(other)))


ADAPTIVE = [fx.Adagrad, fx.Adam, fx.Yogi]


@pytest.mark.parametrize("make", ADAPTIVE)
def test_a_large_tau_makes_an_adaptive_rule_average(make: type[Any]) -> None:
    """√v + τ is τ there, so a step of lr τ is FedAvg's; β₁ = 0 leaves the momentum out.

    A v that starts at τ² doubles the denominator and halves steps: FedAdam's until it has decayed.
    """
    tau = 2.0**20
    plain: dict[str, Any] = {"beta1": 0.0} if issubclass(make, fx.Adam) else {}
    moved = trajectory(make(lr=tau, tau=tau, **plain))
    torch.testing.assert_close(moved, trajectory(fx.Average(1.0)), rtol=1e-5, atol=1e-5)
    halved = trajectory(make(lr=tau, tau=tau, form="printed", **plain))
    tolerance = (
        1e-2 if issubclass(make, fx.Adam) else 1e-5
    )  # of which a round costs 1 - √β₂ = 0.005, halved
    torch.testing.assert_close(halved[0], trajectory(fx.Average(0.5))[0], rtol=tolerance, atol=1e-5)


def test_the_first_step_of_fedams_is_that_of_fedadam() -> None:
    """The maximum over one round; √max(v, τ) is √v where every v is above τ."""
    adam, ams = fx.Adam(tau=1e-3), fx.AMS(0.1, tau=1e-3, stabilise="sum")
    assert torch.equal(trajectory(adam)[0], trajectory(ams)[0])
    floor = fx.AMS(0.1, tau=1e-30)
    torch.testing.assert_close(trajectory(fx.Adam(tau=0.0))[0], trajectory(floor)[0])


@pytest.mark.parametrize("make", ADAPTIVE)
def test_forms_agree_where_tau_is_zero(make: type[Any]) -> None:
    standard, printed = (trajectory(make(tau=0.0, form=form)) for form in ("standard", "printed"))
    assert all(map(torch.equal, standard, printed))
    assert all(bool(params.isfinite().all()) for params in standard)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(fx.UsageError, match="form must be standard, printed or authors, not 'x'"):
        fx.Yogi(form="x")  # type: ignore[arg-type]


def test_one_client_is_plain_averaging() -> None:
    agg = fx.Aggregate.of(random_updates(1, 8, dtype=torch.float32))
    exp, avg = fx.ExP(eps=0.0), fx.Average()
    assert torch.equal(exp.step(PARAMS, agg, exp.init(PARAMS))[0], avg.step(PARAMS, agg, {})[0])


def test_averaging_with_lr_one_is_the_mean_of_the_local_models() -> None:
    local = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params = PARAMS.double()
    moved, _, _ = fx.Average().step(params, fx.Aggregate.of(params - local), {})
    torch.testing.assert_close(moved, local.mean(0), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.0, 0.0), 1.0),  # 0/0: all updates are zero
        ((1.0, 0.0), 1.0),  # the updates cancel: there is nothing to scale
        ((1.0, 0.0, 1e-3), 1.0),
        ((8.0, 1.0), 4.0),
        ((8.0, 1.0, 1.0), 2.0),
        ((3.0, 2.0), 1.0),  # the clamp
        ((8.0, 1.0, math.inf), 1.0),
        ((1.0, 5e-324), 1.0),  # the ratio overflows
    ],
)
def test_step_size_is_defined_for_every_input(given: tuple[float, ...], expected: float) -> None:
    eta = fx.exp_step_size(*given)
    assert isinstance(eta, float)
    assert eta == expected
    assert fx.exp_step_size(*map(torch.tensor, given)).item() == expected  # type: ignore[union-attr]


def test_step_size_options() -> None:
    assert fx.exp_step_size(8.0, 1.0, factor=1.0) == 8.0
    assert fx.exp_step_size(1.0, 1.0, clamp=False) == 0.5
    assert fx.exp_step_size(80.0, 1.0, max_step=3.0) == 3.0
    assert fx.exp_step_size(1.0, 5e-324, max_step=3.0) == 3.0  # overflows, but is bounded


def test_metrics_report_clamp_and_eps_share() -> None:
    agree = fx.Aggregate.of(torch.ones(3, 4))  # r = 1: the clamp is active
    rule = fx.ExP(eps=4.0)
    _, _, metrics = rule.step(torch.zeros(4), agree, rule.init(torch.zeros(4)))
    assert metrics["clamped"].item() == 1.0
    assert metrics["eps_share"].item() == pytest.approx(0.5)  # ||mean||² is 4 too
    differ = fx.Aggregate.of(torch.eye(8))
    free = fx.ExP(eps=0.0)
    _, _, metrics = free.step(torch.zeros(8), differ, free.init(torch.zeros(8)))
    assert metrics["clamped"].item() == 0.0
    assert metrics["eps_share"].item() == 0.0
    assert metrics["server_lr"].item() == pytest.approx(4.0)
