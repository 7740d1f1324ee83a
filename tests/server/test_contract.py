"""The contract of server rules, checked for every rule of the table."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

import fedexp as fx
from tests.helpers.rules import EXTRAPOLATING, SERVER_RULES, random_updates, rule_id

every_rule = pytest.mark.parametrize("rule", SERVER_RULES, ids=rule_id)


def advance(
    rule: fx.ServerRule, params: torch.Tensor, rounds: int = 3
) -> tuple[torch.Tensor, fx.server.State]:
    state = rule.init(params)
    for seed in range(rounds):
        agg = fx.Aggregate.of(random_updates(4, params.numel(), seed, params.dtype))
        params, state, _ = rule.step(params, agg, state)
    return params, state


@every_rule
def test_is_a_frozen_value(rule: fx.ServerRule) -> None:
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert hash(rule) == hash(dataclasses.replace(rule))  # type: ignore[type-var]
    name = dataclasses.fields(rule)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, name, 1.0)


@every_rule
def test_zero_update_is_a_fixed_point(rule: fx.ServerRule) -> None:
    params = torch.tensor([1.0, -2.0, 0.5])
    state = rule.init(params)
    for _ in range(3):
        after, state, metrics = rule.step(params, fx.Aggregate.of(torch.zeros(4, 3)), state)
        assert torch.equal(after, params)
        assert torch.isfinite(metrics["server_lr"])


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keeps_dtype_and_shape(rule: fx.ServerRule, dtype: torch.dtype) -> None:
    params = torch.ones(5, dtype=dtype)
    after, state = advance(rule, params)
    assert (after.dtype, after.shape) == (dtype, params.shape)
    fresh = rule.init(params)
    assert {k: (v.dtype, v.shape) for k, v in state.items()} == {
        k: (v.dtype, v.shape) for k, v in fresh.items()
    }


@every_rule
def test_changes_nothing_it_was_given(rule: fx.ServerRule) -> None:
    params = torch.arange(4.0)
    state = {name: value.clone() for name, value in rule.init(params).items()}
    agg = fx.Aggregate.of(random_updates(3, 4, dtype=torch.float32))
    before = [t.clone() for t in (params, *state.values(), agg.update)]
    rule.step(params, agg, state)
    assert all(map(torch.equal, before, (params, *state.values(), agg.update)))


@every_rule
def test_reads_squared_norms_where_it_states_that(rule: fx.ServerRule) -> None:
    params, sums = torch.zeros(4), fx.Aggregate.of(4 * torch.eye(4))
    hidden = dataclasses.replace(sums, sq_norm=torch.full_like(sums.sq_norm, torch.nan))
    one, other = (rule.step(params, each, rule.init(params))[0] for each in (sums, hidden))
    assert torch.equal(one, other) is not rule.reads_norms


@every_rule
def test_client_order_is_irrelevant(rule: fx.ServerRule) -> None:
    deltas, params = random_updates(6, 5), torch.zeros(5, dtype=torch.float64)
    one, *_ = rule.step(params, fx.Aggregate.of(deltas), rule.init(params))
    two, *_ = rule.step(params, fx.Aggregate.of(deltas.flip(0)), rule.init(params))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


@every_rule
def test_state_survives_a_checkpoint(rule: fx.ServerRule) -> None:
    """State is tensors only: it is stored in numpy files without losing a bit."""
    params = torch.zeros(5, dtype=torch.float64)
    middle, state = advance(rule, params, rounds=2)
    restored = {name: torch.from_numpy(np.array(v.numpy())) for name, v in state.items()}
    agg = fx.Aggregate.of(random_updates(4, 5, seed=9))
    direct, *_ = rule.step(middle, agg, state)
    resumed, *_ = rule.step(middle, agg, restored)
    assert torch.equal(direct, resumed)


@every_rule
def test_reports_its_step_size(rule: fx.ServerRule) -> None:
    params = torch.zeros(3)
    _, _, metrics = rule.step(params, fx.Aggregate.of(torch.eye(3)), rule.init(params))
    assert metrics["server_lr"].shape == ()
    assert metrics["server_lr"] > 0


@pytest.mark.parametrize("rule", EXTRAPOLATING, ids=rule_id)
def test_extrapolating_rules_explain_their_step(rule: fx.ExP) -> None:
    params, deltas = torch.zeros(6, dtype=torch.float64), random_updates(4, 6)
    _, _, metrics = rule.step(params, fx.Aggregate.of(deltas), rule.init(params))
    mean_sq, sq_mean = deltas.square().sum(1).mean(), deltas.mean(0).square().sum()
    assert metrics["diversity"].item() == pytest.approx((mean_sq / sq_mean).item())
    assert metrics["mean_sq_norm"].item() == pytest.approx(mean_sq.item())
    assert metrics["sq_norm_of_mean"].item() == pytest.approx(sq_mean.item())
    assert set(metrics) >= {"server_lr", "clamped", "eps_share"}


@every_rule
def test_converges_on_a_quadratic(rule: fx.ServerRule) -> None:
    """Every rule converges for clients that each step halfway to their own solution set."""
    target = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    params = torch.zeros(3, dtype=torch.float64)
    start = (params - target).norm()
    state = rule.init(params)
    for _ in range(400):
        deltas = 0.5 * torch.diag(params - target)
        params, state, _ = rule.step(params, fx.Aggregate.of(deltas), state)
    assert (params - target).norm() < 0.1 * start


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (fx.Average, {"lr": 0.0}),
        (fx.Average, {"lr": float("nan")}),
        (fx.Momentum, {"beta": 1.0}),
        (fx.ExP, {"eps": -1e-9}),
        (fx.ExP, {"eps": float("nan")}),
        (fx.ExP, {"factor": 0.0}),
        (fx.ExP, {"max_step": 0.5}),
        (fx.ExP, {"eps_mode": "sometimes"}),
        (fx.ExP, {"eps_decay": 1.5}),
        (fx.Adagrad, {"tau": -1.0}),
        (fx.Adam, {"form": "other"}),
        (fx.Adam, {"beta2": 1.0}),
        (fx.AMS, {"stabilise": "min"}),
        (fx.AMS, {"form": "printed"}),
        (fx.StochasticPolyak, {"max_step": 0.5}),
        (fx.NormalisedAverage, {"lr": 0.0}),
        *(
            (rule, {name: "1"})
            for rule, name in [
                *((fx.Average, "lr"), (fx.Momentum, "beta"), (fx.ExP, "eps"), (fx.ExP, "factor")),
                *((fx.Adagrad, "tau"), (fx.Hypergradient, "high"), (fx.Prox, "mu")),
                (fx.StochasticPolyak, "max_step"),
            ]
        ),
    ],
)
def test_options_out_of_range_are_refused(rule: type, options: dict) -> None:
    with pytest.raises(fx.UsageError, match=next(iter(options))):
        rule(**options)


@every_rule
def test_accepts_tensors_arrays_and_lists(rule: fx.ServerRule) -> None:
    deltas, start = random_updates(3, 4), [0.5, 1.0, 1.5, 2.0]
    results = []
    for params in (start, np.array(start), torch.tensor(start, dtype=torch.float64)):
        next_params, _, _ = rule.step(params, fx.Aggregate.of(deltas), rule.init(params))  # type: ignore[arg-type]
        results.append(next_params.double())
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-5)
