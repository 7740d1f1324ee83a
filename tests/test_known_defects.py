"""One test for each defect found in public implementations of FedExP (docs/paper.md#known-defects).

Each compares our step with the right number and with the number the defect would give, so the
test itself shows that the two differ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from tests.helpers.problems import BatchNormNet, classes_task, least_squares
from tests.helpers.rules import random_updates

LAYERS = (3, 5)  # sizes of two layers of a model with eight parameters
DELTAS = random_updates(4, 8) * torch.tensor([5.0] * 3 + [0.1] * 5)  # layers of other scales


def step_size(deltas: torch.Tensor, weights: torch.Tensor | None = None) -> float:
    params = torch.zeros(deltas.shape[1], dtype=torch.float64)
    rule = fx.ExP(eps=0.0, clamp=False)
    _, _, metrics = rule.step(params, fx.Aggregate.of(deltas, weights), rule.init(params))
    return metrics["server_lr"].item()


def test_norms_are_squared() -> None:
    right = (DELTAS.norm(dim=1) ** 2).mean() / (2 * DELTAS.mean(0).norm() ** 2)
    wrong = DELTAS.norm(dim=1).mean() / (2 * DELTAS.mean(0).norm())
    assert step_size(DELTAS) == pytest.approx(right.item())
    assert step_size(DELTAS) != pytest.approx(wrong.item(), rel=0.1)


def test_one_step_size_for_the_whole_model() -> None:
    params = torch.zeros(8, dtype=torch.float64)
    rule = fx.ExP(eps=0.0, clamp=False)
    next_params, _, _ = rule.step(params, fx.Aggregate.of(DELTAS), rule.init(params))
    ratios = next_params / -DELTAS.mean(0)
    torch.testing.assert_close(ratios, torch.full_like(ratios, step_size(DELTAS)))
    layer_wise = [step_size(part) for part in DELTAS.split(LAYERS, dim=1)]
    assert layer_wise[0] != pytest.approx(layer_wise[1], rel=0.1)


def test_the_norm_has_the_weights_of_the_mean() -> None:
    p = torch.tensor([1.0, 2.0, 3.0, 10.0]).double()
    q = p / p.sum()
    mean = (q[:, None] * DELTAS).sum(0)
    right = (q * DELTAS.square().sum(1)).sum() / (2 * mean.square().sum())
    mixed = DELTAS.square().sum(1).mean() / (2 * mean.square().sum())
    assert step_size(DELTAS, p) == pytest.approx(right.item())
    assert step_size(DELTAS, p) != pytest.approx(mixed.item(), rel=0.02)


def test_the_step_size_is_applied() -> None:
    task = least_squares(clients=8)
    exp, avg = (next(fx.simulate(task, a, 1)) for a in (fx.fedexp(eps=0.0), fx.fedavg()))
    assert exp.server_lr is not None
    assert exp.server_lr > 1.5
    torch.testing.assert_close(exp.state.params, exp.server_lr * avg.state.params)


def test_the_mean_of_two_iterates_is_not_fed_back() -> None:
    task, exp = least_squares(), fx.fedexp(eps=0.0)
    iterates = [r.state.params for r in fx.simulate(task, exp, 4)]
    start = fx.SimulationState.initial(task, exp, seed=0)
    fed_back = replace(start, round=3, params=(iterates[2] + iterates[1]) / 2)
    wrong = next(fx.simulate(task, exp, 4, start=fed_back)).state.params
    right = next(fx.simulate(task, exp, 4, start=replace(start, round=3, params=iterates[2])))
    assert torch.equal(right.state.params, iterates[3])
    assert not torch.allclose(wrong, iterates[3], rtol=1e-3)


def test_the_first_average_is_not_with_a_zero_vector() -> None:
    start = torch.full((20,), 7.0, dtype=torch.float64)
    task = least_squares()
    task = replace(task, objective=type(task.objective)(start))  # type: ignore[call-arg]
    record = next(fx.simulate(task, fx.fedexp(), 1))
    assert torch.equal(record.state.output()[0], record.state.params)
    assert not torch.allclose(record.state.output()[0], record.state.params / 2, rtol=0.1)


def test_clients_on_flower_do_not_train_from_the_mean_of_two_iterates() -> None:
    """Flower's draft (pull request 2320) sends the mean that it evaluates."""
    from tests.flower.helpers.draft import in_numpy, on_flower  # needs Flower

    (sent, _), (right, _), (wrong, _) = on_flower(4), in_numpy(4), in_numpy(4, True)
    np.testing.assert_allclose(sent, right, rtol=1e-5)
    assert not np.allclose(wrong[2:], right[2:], rtol=0.05)


def test_the_first_round_on_flower_does_not_halve_the_model() -> None:
    """Flower's draft (pull request 2320) takes its first mean with a model of zeros."""
    from tests.flower.helpers.draft import in_numpy, on_flower  # needs Flower

    (_, evaluated), (_, right) = on_flower(1), in_numpy(1)
    _, halved = in_numpy(1, True, previous=np.zeros_like(right[0]))
    np.testing.assert_allclose(evaluated, right, rtol=1e-5)
    np.testing.assert_allclose(halved, np.array(right) / 2)
    assert not np.allclose(halved, evaluated, rtol=0.4)


def test_momentum_is_applied() -> None:
    task = least_squares()
    with_momentum = list(fx.simulate(task, fx.fedexp_m(beta=0.9), 4))
    typo = list(fx.simulate(task, fx.fedexp_m(beta=0.9, apply_momentum=False), 4))
    assert torch.equal(with_momentum[0].state.params, typo[0].state.params)
    assert not torch.allclose(with_momentum[1].state.params, typo[1].state.params, rtol=1e-3)


def test_batch_norm_variances_are_not_extrapolated() -> None:
    """Ever smaller inputs let variances fall; extrapolated by 30 they would be negative."""
    task = classes_task(BatchNormNet)
    fields = {**task.train.fields, "x": task.train.fields["x"] * 1e-3}
    task = replace(task, train=replace(task.train, fields=fields))
    start = task.objective.initial(0)[1]
    local = fx.LocalTraining(lr=0.01, steps=4, batch_size=None)
    record = next(fx.simulate(task, fx.fedavg(lr=30.0), 1, local=local))
    variance = task.objective.load(*record.state.output()).norm.running_var  # type: ignore[attr-defined]
    change = record.state.buffers.averaged - start.averaged
    assert (variance > 0).all()
    assert (start.averaged + 30 * change < 0).any()  # what extrapolation would have done


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_updates_that_cancel_leave_the_model_alone(eps: float) -> None:
    params, rule = torch.ones(2), fx.ExP(eps=eps)
    agg = fx.Aggregate.of([[1.0, 2.0], [-1.0, -2.0]])
    next_params, _, metrics = rule.step(params, agg, rule.init(params))
    assert torch.equal(next_params, params)
    assert metrics["server_lr"].item() == 1.0


def test_float16_updates_do_not_overflow_the_norm() -> None:
    deltas = torch.eye(4, dtype=torch.float16) * 1000  # 1e6 is beyond float16
    assert step_size(deltas) == pytest.approx(2.0)


def test_models_with_frozen_and_unused_parameters_work() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)
            self.used.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    task = classes_task(Partly)
    start, buffers = task.objective.initial(0)
    assert start.numel() == 12 + 6
    assert buffers.averaged.numel() == 0
    *_, record = fx.simulate(task, fx.fedexp(), 3)
    assert torch.equal(record.state.params[12:], start[12:])
