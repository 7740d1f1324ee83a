"""FedHyper-G and the step sizes of FedExProx: golden values, and the theory on quadratics.

Clients have F_i(z) = ||A_i z - b_i||² / 2 with a common minimiser, and compute their proximal
operators exactly, in closed form.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fedexp as fx
from tests.engine.helpers import EXACT
from tests.helpers.problems import classes_task, least_squares
from tests.helpers.rules import random_updates

CLIENTS, ROWS, DIM = 6, 3, 12


def problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features [M, n, d], targets [M, n] and a common minimiser [d]."""
    rng = np.random.default_rng(seed)
    A, star = rng.normal(size=(CLIENTS, ROWS, DIM)), rng.normal(size=DIM)
    return A, A @ star, star


def proximal_sums(A: np.ndarray, b: np.ndarray, w: np.ndarray, gamma: float) -> fx.Aggregate:
    """Return the sums of clients that compute prox of γ F_i at w exactly, envelopes included."""
    ends = [
        np.linalg.solve(np.eye(DIM) + gamma * each.T @ each, w + gamma * each.T @ own)
        for each, own in zip(A, b, strict=True)
    ]
    losses = [
        0.5 * float(np.square(each @ end - own).sum())
        for each, own, end in zip(A, b, ends, strict=True)
    ]
    deltas = torch.from_numpy(w - np.stack(ends))
    extras = fx.ProxEnvelope(1 / gamma).loss_extras(torch.tensor(losses).double()[:, None], deltas)
    return fx.Aggregate.of(deltas, None, extras)


def test_hypergradient_golden() -> None:
    rng = np.random.default_rng(0)
    w, alpha, last = np.zeros(DIM), 1.0, np.zeros(DIM)
    rule, params = fx.Hypergradient(), torch.zeros(DIM, dtype=torch.float64)
    state, steps = rule.init(params), []
    for _ in range(12):
        updates = rng.normal(size=(CLIENTS, DIM)) + 0.5
        mean = updates.mean(0)
        alpha = min(5.0, max(0.2, alpha + float(mean @ last)))
        w, last = w - alpha * mean, mean
        params, state, metrics = rule.step(params, fx.Aggregate.of(updates), state)
        steps.append(metrics["server_lr"].item())
        assert steps[-1] == pytest.approx(alpha, rel=1e-12)
    np.testing.assert_allclose(params.numpy(), w, rtol=1e-12)
    assert steps[0] == 1.0
    assert steps[-1] == 5.0  # the updates agree


def test_hypergradient_is_bounded_below_where_updates_turn_back() -> None:
    rule, params = fx.Hypergradient(), torch.zeros(3)
    state = rule.init(params)
    for sign in (1.0, -1.0, 1.0):
        update = fx.Aggregate.of(sign * torch.ones(2, 3))
        params, state, metrics = rule.step(params, update, state)
    assert metrics["server_lr"].item() == 0.2


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"low": 0.0}, {"high": math.inf}])
def test_hypergradient_refuses_bounds_that_are_none(options: dict[str, float]) -> None:
    with pytest.raises(fx.UsageError, match=r"must be"):
        fx.Hypergradient(**options)


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": 10.0}, {"high": 0.1}])
def test_hypergradient_refuses_a_start_outside_its_bounds(options: dict[str, float]) -> None:
    with pytest.raises(fx.UsageError, match=r"change lr or the bounds"):
        fx.Hypergradient(**options)


@pytest.mark.parametrize("gamma", [0.05, 1.0, 50.0])
@pytest.mark.parametrize("make", [fx.fedexprox_grads, fx.fedexprox_stops])
def test_fedexprox_approaches_every_common_minimiser(make: Any, gamma: float) -> None:
    """With exact proximal operators no step increases the distance to a common minimiser."""
    A, b, star = problem(seed=1)
    rule, params = make(mu=1 / gamma).server, torch.zeros(DIM, dtype=torch.float64)
    state = rule.init(params)
    for _ in range(60):
        before = np.linalg.norm(params.numpy() - star)
        sums = proximal_sums(A, b, params.numpy(), gamma)
        params, state, metrics = rule.step(params, sums, state)
        assert np.linalg.norm(params.numpy() - star) <= before * (1 + 1e-12)
        assert metrics["server_lr"] > 0
    loss = 0.5 * np.square(A @ params.numpy() - b).sum()
    assert loss < 0.02 * 0.5 * np.square(b).sum()


def test_grads_is_the_diversity_and_at_least_one() -> None:
    rule, params = fx.fedexprox_grads().server, torch.zeros(8, dtype=torch.float64)
    for seed in range(20):
        deltas = random_updates(4, 8, seed)
        *_, metrics = rule.step(params, fx.Aggregate.of(deltas), rule.init(params))
        expected = deltas.square().sum(1).mean() / deltas.mean(0).square().sum()
        assert metrics["server_lr"].item() == pytest.approx(expected.item(), rel=1e-12)
        assert metrics["server_lr"] >= 1
    alike = fx.Aggregate.of(torch.ones(4, 8))  # equality: all clients agree
    *_, metrics = rule.step(params, alike, rule.init(params))
    assert metrics["server_lr"].item() == pytest.approx(1.0)
    assert fx.fedexprox_grads().iterates == 1


def test_stops_is_the_polyak_step_of_the_mean_envelope() -> None:
    """α = mean (M_i - inf) / (γ ||mean ∇M_i||²), from M_i and ∇M_i = (w - prox_i) / γ."""
    A, b, _ = problem(seed=2)
    w, gamma, inf = np.linspace(-1, 1, DIM), 0.7, 0.01
    ends = np.stack(
        [
            np.linalg.solve(np.eye(DIM) + gamma * each.T @ each, w + gamma * each.T @ own)
            for each, own in zip(A, b, strict=True)
        ]
    )
    losses = 0.5 * np.square(np.einsum("mnd,md->mn", A, ends) - b).sum(1)
    envelopes = losses + np.square(ends - w).sum(1) / (2 * gamma)
    gradient = ((w - ends) / gamma).mean(0)
    alpha = (envelopes - inf).mean() / (gamma * gradient @ gradient)
    deltas = torch.from_numpy(w - ends)
    client = fx.ProxEnvelope(1 / gamma, inf=inf)
    extras = client.loss_extras(torch.from_numpy(losses)[:, None], deltas)
    rule = fx.StochasticPolyak()
    params, _, metrics = rule.step(
        torch.from_numpy(w), fx.Aggregate.of(deltas, None, extras), rule.init(torch.zeros(DIM))
    )
    assert metrics["server_lr"].item() == pytest.approx(alpha, rel=1e-12)
    np.testing.assert_allclose(params.numpy(), w - alpha * (w - ends).mean(0), rtol=1e-12)


def test_stops_at_the_minimiser_and_where_the_infimum_is_too_high() -> None:
    rule, start = fx.StochasticPolyak(), torch.ones(3)
    still = {"envelope": torch.zeros(4, 1)}
    params, _, metrics = rule.step(start, fx.Aggregate.of(torch.zeros(4, 3), None, still), {})
    assert torch.equal(params, start)
    assert metrics["server_lr"] == 1
    negative = {"envelope": -torch.ones(4, 1)}
    params, *_ = rule.step(start, fx.Aggregate.of(torch.ones(4, 3), None, negative), {})
    assert torch.equal(params, start)  # never uphill
    long = {"envelope": 1e3 * torch.ones(4, 1)}
    bounded = fx.StochasticPolyak(max_step=7.0)
    *_, metrics = bounded.step(start, fx.Aggregate.of(torch.ones(4, 3), None, long), {})
    assert metrics["server_lr"] == 7


@pytest.mark.parametrize("engine", ["loop", "threads", "batched"])
def test_the_loss_in_the_sums_is_that_of_the_trained_client(engine: Any) -> None:
    """With BatchNorm: F_i(w_i) is evaluated with the client's own statistics."""
    task, mu, inf = classes_task(), 0.5, 0.01
    algorithm = fx.fedexprox_stops(mu, inf)
    averaging = fx.Algorithm(client=fx.Prox(mu))
    excess, deltas = [], []
    for client in range(task.train.clients):
        state = next(fx.simulate(task, averaging, 1, [client], engine="loop")).state
        data = task.train.client(client)
        loss = task.objective.measure(state.params, state.buffers, data)["loss"].mean()
        deltas.append(task.objective.initial(0)[0] - state.params)
        excess.append((loss - inf) / mu + deltas[-1].square().sum() / 2)
    expected = torch.stack(excess).mean() / torch.stack(deltas).mean(0).square().sum()
    record = next(fx.simulate(task, algorithm, 1, "all", engine=engine))
    assert record.server_lr == pytest.approx(expected.item(), rel=1e-4)


def test_constant_extrapolation_is_fedprox_with_a_server_step() -> None:
    runs = [
        list(fx.simulate(least_squares(), algorithm, 3))[-1].state.params
        for algorithm in (fx.fedexprox(mu=0.5, lr=1.3), fx.fedprox(mu=0.5, lr=1.3))
    ]
    torch.testing.assert_close(*runs, **EXACT)


def test_a_rule_without_its_client_rule_names_the_remedy() -> None:
    sums = fx.Aggregate.of(torch.ones(2, 3))
    with pytest.raises(fx.UsageError, match=r"use client=fedexp.ProxEnvelope\(mu\)"):
        fx.StochasticPolyak().step(torch.zeros(3), sums, {})
    with pytest.raises(fx.UsageError, match=r"use client=fedexp.Nova\(\)"):
        fx.NormalisedAverage().step(torch.zeros(3), sums, {})
    with pytest.raises(fx.UsageError, match="mu must be > 0"):
        fx.ProxEnvelope(0.0)
