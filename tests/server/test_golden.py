"""Golden values: each computed by a few lines of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedexp as fx
from tests.helpers.rules import random_updates

ROUNDS, CLIENTS, DIM = 4, 5, 6
UPDATES = [random_updates(CLIENTS, DIM, seed).numpy() for seed in range(ROUNDS)]
START = np.linspace(-1, 1, DIM)


def run(rule: fx.ServerRule) -> tuple[np.ndarray, list[float]]:
    params, etas = torch.from_numpy(START.copy()), []
    state = rule.init(params)
    for deltas in UPDATES:
        params, state, metrics = rule.step(params, fx.Aggregate.of(deltas), state)
        etas.append(metrics["server_lr"].item())
    return params.numpy(), etas


def check(rule: fx.ServerRule, expected: np.ndarray) -> list[float]:
    got, etas = run(rule)
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)
    return etas


def squared(x: np.ndarray) -> float:
    return float((x**2).sum())


def test_average() -> None:
    w = START.copy()
    for d in UPDATES:
        w = w - 0.7 * d.mean(0)
    assert check(fx.Average(0.7), w) == [0.7] * ROUNDS


def test_momentum() -> None:
    w, v = START.copy(), np.zeros(DIM)
    for d in UPDATES:
        v = d.mean(0) + 0.9 * v
        w = w - 0.7 * v
    check(fx.Momentum(0.7, 0.9), w)


def test_nesterov_momentum() -> None:
    w, v = START.copy(), np.zeros(DIM)
    for d in UPDATES:
        v = 0.9 * v + d.mean(0)
        w = w - 0.7 * (d.mean(0) + 0.9 * v)
    check(fx.Momentum(0.7, 0.9, nesterov=True), w)


def test_nesterov_momentum_is_that_of_torch() -> None:
    w = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = torch.optim.SGD([w], 0.7, momentum=0.9, nesterov=True)
    for d in UPDATES:
        w.grad = torch.from_numpy(d.mean(0))
        optimizer.step()
    check(fx.Momentum(0.7, 0.9, nesterov=True), w.detach().numpy())


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_exp(eps: float) -> None:
    w, etas = START.copy(), []
    for d in UPDATES:
        eta = max(1.0, sum(map(squared, d)) / (2 * CLIENTS * (squared(d.mean(0)) + eps)))
        etas.append(eta)
        w = w - eta * d.mean(0)
    assert check(fx.ExP(eps), w) == pytest.approx(etas, rel=1e-13)
    assert max(etas) > 1  # the clamp is not what is being tested


def test_exp_as_the_authors_run_it() -> None:
    w, eps = START.copy(), 0.1
    for d in UPDATES:
        eps *= 0.998**2
        eta = max(1, sum(map(squared, d)) / (2 * CLIENTS * (squared(d.mean(0)) + CLIENTS * eps)))
        w = w - eta * d.mean(0)
    rule = fx.ExP(0.1, eps_mode="participants", eps_decay=0.998**2, decay_before_first_round=True)
    check(rule, w)


def test_exp_with_relative_eps() -> None:
    w = START.copy()
    for d in UPDATES:
        m = np.mean([squared(x) for x in d])
        w = w - max(1, m / (2 * (squared(d.mean(0)) + 0.05 * m))) * d.mean(0)
    check(fx.ExP(0.05, eps_mode="relative"), w)


def test_momentum_exp_from_the_unrolled_sum() -> None:
    """The printed numerator, m^t + sum over k < t of (β/2)^(t-k) m^k, and no clamp."""
    w, v, beta, eps = START.copy(), np.zeros(DIM), 0.8, 0.2
    means = [np.mean([squared(x) for x in d]) for d in UPDATES]
    for t, d in enumerate(UPDATES):
        v = d.mean(0) + beta * v
        numerator = sum((beta / 2) ** (t - k) * means[k] for k in range(t + 1))
        w = w - numerator / (2 * (squared(v) + eps)) * v
    check(fx.MomentumExP(eps, beta=beta), w)


def test_momentum_exp_with_the_released_typo() -> None:
    w, s = START.copy(), np.float64(0.0)
    for d in UPDATES:
        s = np.mean([squared(x) for x in d]) + 0.45 * s
        w = w - s / (2 * (squared(d.mean(0)) + 0.2)) * d.mean(0)
    check(fx.MomentumExP(0.2, beta=0.9, apply_momentum=False), w)


# The start of v by form: 0, except in Algorithm 2 of Reddi et al. as printed.
STARTS = {"standard": 0.0, "printed": 0.1**2}


@pytest.mark.parametrize("form", STARTS)
def test_adagrad(form: Any) -> None:
    w, v = START.copy(), np.full(DIM, STARTS[form])
    for d in UPDATES:
        v = v + d.mean(0) ** 2
        w = w - 0.5 * d.mean(0) / (np.sqrt(v) + 0.1)
    check(fx.Adagrad(0.5, tau=0.1, form=form), w)


def test_adagrad_as_the_authors_run_it() -> None:
    w, v = START.copy(), np.zeros(DIM)
    for d in UPDATES:
        v = v + d.mean(0) ** 2
        w = w - 0.5 * d.mean(0) / np.sqrt(v + 0.01)
    check(fx.Adagrad(0.5, tau=0.01, form="authors"), w)


@pytest.mark.parametrize("form", STARTS)
@pytest.mark.parametrize("yogi", [False, True])
def test_adam_and_yogi(yogi: bool, form: Any) -> None:
    w, m, v = START.copy(), np.zeros(DIM), np.full(DIM, STARTS[form])
    for d in UPDATES:
        g = d.mean(0)
        m = 0.9 * m + 0.1 * g
        v = v - 0.01 * g**2 * np.sign(v - g**2) if yogi else 0.99 * v + 0.01 * g**2
        w = w - 0.5 * m / (np.sqrt(v) + 0.1)
    check((fx.Yogi if yogi else fx.Adam)(0.5, tau=0.1, form=form), w)


def test_adam_as_the_authors_run_it() -> None:
    """Squares the momentum; the corrections /.1 and /.01 cancel (docs/paper.md#released-adam)."""
    w, m, v = START.copy(), np.zeros(DIM), np.zeros(DIM)
    for d in UPDATES:
        m = 0.9 * m + 0.1 * d.mean(0)
        v = 0.99 * v + 0.01 * m**2
        w = w - 0.5 * (m / 0.1) / np.sqrt(v / 0.01 + 0.01)
    check(fx.Adam(0.5, tau=1e-4, form="authors"), w)


@pytest.mark.parametrize("stabilise", ["max", "sum"])
def test_ams(stabilise: Any) -> None:
    w, m, v, largest = START.copy(), np.zeros(DIM), np.zeros(DIM), np.zeros(DIM)
    tau = 0.01
    for d in (*UPDATES[:2], *(0.1 * each for each in UPDATES[2:])):
        g = d.mean(0)
        m, v = 0.9 * m + 0.1 * g, 0.5 * v + 0.5 * g**2
        if stabilise == "max":
            largest = np.maximum(np.maximum(largest, v), tau)
            w = w - 0.5 * m / np.sqrt(largest)
        else:
            largest = np.maximum(largest, v)
            w = w - 0.5 * m / (np.sqrt(largest) + tau)
    assert (largest > v).any()  # the maximum matters
    rule = fx.AMS(0.5, tau=tau, beta2=0.5, stabilise=stabilise)
    params, state = torch.from_numpy(START.copy()), rule.init(torch.from_numpy(START))
    for d in (*UPDATES[:2], *(0.1 * each for each in UPDATES[2:])):
        params, state, _ = rule.step(params, fx.Aggregate.of(d), state)
    np.testing.assert_allclose(params.numpy(), w, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5, 4.0, 1.0]])
def test_fednova(weights: list[float] | None) -> None:
    """x - τ_eff sum p_i Δ_i / τ_i with τ_eff = sum p_i τ_i, for p that sum to 1."""
    w, steps = START.copy(), np.array([1.0, 3.0, 7.0, 2.0, 20.0])
    p = np.ones(CLIENTS) / CLIENTS if weights is None else np.array(weights) / np.sum(weights)
    client, rule = fx.Nova(), fx.NormalisedAverage(0.7)
    params = torch.from_numpy(START.copy())
    total_lr = torch.from_numpy(0.1 * steps)[:, None]
    for d in UPDATES:
        w = w - 0.7 * (p @ steps) * (p / steps) @ d
        deltas = torch.from_numpy(d)
        _, extras = client.end_round(deltas, total_lr, {}, {})
        factor = client.weight_factor(total_lr)
        assert isinstance(factor, torch.Tensor)
        own = torch.from_numpy(p) * factor.flatten()
        params, *_ = rule.step(params, fx.Aggregate.of(deltas, own, extras), {})
    np.testing.assert_allclose(params.numpy(), w, rtol=1e-12, atol=1e-14)
