"""The outer optimizer: equal to its rule on one vector, and an optimizer as torch expects."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fedexp as fx
from fedexp.outer import OuterOptimizer
from tests.helpers.rules import SERVER_RULES, random_updates, rule_id

SHAPES = [(3, 2), (4,), (), (2, 1, 2)]
SIZES = [6, 4, 1, 4]
EXP = fx.ExP(eps=0.0)
ROUNDED = partial(pytest.approx, rel=1e-15, abs=0)  # a norm in float64 that is squared
every_rule = pytest.mark.parametrize("rule", SERVER_RULES, ids=rule_id)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def updates(round: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The updates of 3 workers in a round, [3, 15]."""
    return random_updates(3, 15, seed=round, dtype=dtype)


def set_mean(outer: OuterOptimizer, deltas: Tensor) -> fx.Aggregate:
    """Set the mean of updates and of their squared norms; return their aggregate."""
    sums = fx.Aggregate.of(deltas)
    params = [p for group in outer.param_groups for p in group["params"] if p.requires_grad]
    parts = sums.mean.split([p.numel() for p in params])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view_as(param).to(param)
    outer.set_sums(sq_norm=sums.mean_sq_norm, count=sums.count)
    return sums


def vector(params: list[nn.Parameter]) -> Tensor:
    return torch.cat([param.detach().flatten() for param in params])


def split(vector: Tensor) -> list[Tensor]:
    parts = zip(vector.split(SIZES), SHAPES, strict=True)
    return [part.view(shape) for part, shape in parts]


def take(outer: OuterOptimizer, *rounds: int) -> None:
    for round in rounds:
        set_mean(outer, updates(round))
        outer.step()


@every_rule
def test_a_step_is_the_rule_on_one_vector_over_all_groups(rule: fx.ServerRule) -> None:
    params = parameters()
    outer = OuterOptimizer([{"params": params[:1]}, {"params": params[1:]}], rule)
    w = vector(params)
    state = rule.init(w)
    for round in range(3):
        sums = set_mean(outer, updates(round))
        one = torch.tensor(1.0, dtype=torch.float64)
        means = fx.Aggregate(one, sums.mean, sums.mean_sq_norm, sums.count, sums.dropped)
        w, state, metrics = rule.step(w, means, state)
        outer.step()
        assert torch.equal(vector(params), w)
        expected = {name: value.item() for name, value in metrics.items()}
        assert outer.metrics == pytest.approx({**expected, "count": 3, "dropped": 0}, rel=0, abs=0)


def test_fedexp_by_hand() -> None:
    """Δ are [3, 0] and [-1, 2]: m = (9 + 5) / 2 = 7, s = 1 + 1 = 2; η = 7 / 4."""
    weights, bias = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))
    outer = OuterOptimizer([weights, bias], EXP)
    start = [weights.detach().clone(), bias.detach().clone()]
    sq_norms = []
    for local in ([-2.0, 2.0], [2.0, 0.0]):
        with torch.no_grad():
            weights.fill_(local[0])
            bias.fill_(local[1])
        outer.set_pseudo_gradients(start)
        assert [weights.item(), bias.item()] == [1.0, 2.0]
        sq_norms.append(outer.local_sq_norm().item())
    assert sq_norms == [9.0, ROUNDED(5.0)]
    assert [p.grad.item() for p in (weights, bias) if p.grad is not None] == [-1.0, 2.0]
    weights.grad, bias.grad = torch.tensor([1.0]), torch.tensor([1.0])
    outer.set_sums(sq_norm=sum(sq_norms) / 2, count=2)
    outer.step()
    assert outer.metrics["server_lr"] == ROUNDED(1.75)
    assert [weights.item(), bias.item()] == [1.0 - 1.75, 2.0 - 1.75]


def test_sums_that_are_no_means_have_a_weight() -> None:
    """A third of the sum of two updates, one of three workers adding nothing, is 2/3 of a mean."""
    results = []
    for scale in (1.0, 2 / 3):
        params = parameters()
        outer = OuterOptimizer(params, EXP)
        sums = set_mean(outer, updates(0)[:2])
        for param in params:
            assert param.grad is not None
            param.grad *= scale
        outer.set_sums(sq_norm=scale * sums.mean_sq_norm, count=2, weight=scale)
        outer.step()
        results.append(vector(params))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@every_rule
def test_a_resumed_run_has_the_same_bits(rule: fx.ServerRule, dtype: torch.dtype) -> None:
    params, file = parameters(dtype), io.BytesIO()
    outer = OuterOptimizer(params, rule)
    take(outer, 0, 1)
    torch.save({"params": params, "outer": outer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    resumed = OuterOptimizer(stored["params"], rule)
    resumed.load_state_dict(stored["outer"])
    for one in (outer, resumed):
        take(one, 2, 3)
    with outer.averaged_parameters(), resumed.averaged_parameters():
        assert torch.equal(vector(params), vector(stored["params"]))
    assert torch.equal(vector(params), vector(stored["params"]))
    assert outer.metrics == resumed.metrics


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@every_rule
def test_copies_continue_alike(rule: fx.ServerRule, copied: object) -> None:
    outer = OuterOptimizer(parameters(), rule)
    take(outer, 0, 1)
    set_mean(outer, updates(2))  # torch copies no gradients
    other = copied(outer)  # type: ignore[operator]
    assert (other.rule, other.metrics) == (outer.rule, outer.metrics)
    for one, moved in ((outer, True), (other, False)):
        take(one, 2)
        same = map(torch.equal, outer.param_groups[0]["params"], other.param_groups[0]["params"])
        assert all(same) is not moved


@pytest.mark.parametrize("rule", [fx.MomentumExP(), fx.Momentum()], ids=rule_id)
def test_torchs_distributed_checkpoints_restore_it(rule: fx.ServerRule) -> None:
    weights = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        outer = OuterOptimizer(model.parameters(), rule)
        draw = torch.Generator().manual_seed(0)
        for round in range(3):
            if round == 2 and resumes:
                outer.zero_grad()
                stored = get_optimizer_state_dict(model, outer)
                outer = OuterOptimizer(model.parameters(), rule)
                set_optimizer_state_dict(model, outer, stored)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=draw)
            outer.set_sums(sq_norm=40.0, count=2)
            outer.step()
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*weights)


def test_a_rule_that_reads_norms_refuses_to_step_without_new_ones() -> None:
    params = parameters()
    outer = OuterOptimizer(params, EXP)
    set_mean(outer, updates(0))
    outer.step()
    before = vector(params)
    with pytest.raises(fx.UsageError, match=r"ExP reads .* squared norms.*outer\.all_reduce\(\)"):
        outer.step()  # those of the step before count once
    assert torch.equal(vector(params), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@every_rule
def test_what_is_not_finite_is_refused_and_changes_nothing(
    rule: fx.ServerRule, value: float
) -> None:
    params, other = parameters(), parameters()
    outer, undisturbed = OuterOptimizer(params, rule), OuterOptimizer(other, rule)
    take(outer, 0)
    set_mean(outer, updates(1))
    assert params[1].grad is not None
    params[1].grad[2] = value
    with pytest.raises(fx.FedExPError, match="is not finite, and was not taken"):
        outer.step()
    take(undisturbed, 0)
    assert torch.equal(vector(params), vector(other))
    for one in (outer, undisturbed):
        take(one, 2)
    with outer.averaged_parameters(), undisturbed.averaged_parameters():
        assert torch.equal(vector(params), vector(other))


@pytest.mark.parametrize("sums", [{"sq_norm": torch.nan}, {"sq_norm": 9.0, "weight": 0.0}])
def test_sums_that_are_not_finite_are_refused(sums: dict) -> None:
    params = parameters()
    outer = OuterOptimizer(params, EXP)
    set_mean(outer, updates(0))
    outer.set_sums(count=3, **sums)
    before = vector(params)
    with pytest.raises(fx.FedExPError, match="is not finite, and was not taken"):
        outer.step()
    assert torch.equal(vector(params), before)


def test_an_overflow_of_the_parameters_type_is_refused() -> None:
    weight = nn.Parameter(torch.tensor([6e4], dtype=torch.float16))  # the largest is 65504
    outer = OuterOptimizer([weight], fx.Average(lr=2.0))
    weight.grad = torch.tensor([-3e3], dtype=torch.float16)
    with pytest.raises(fx.FedExPError, match="is not finite"):
        outer.step()
    assert weight.item() == 6e4


def test_parameters_of_several_types_are_one_vector() -> None:
    """m = 25 and s = 1.5² + 1.5² + 4² over both: η = 25/41; of each alone it is 1 and 1/2."""
    half = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    double = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    outer = OuterOptimizer([half, double], fx.ExP(eps=0.0, clamp=False))
    deltas = torch.tensor([[3.0, 0.0, 4.0], [0.0, 3.0, 4.0]])
    sums = set_mean(outer, deltas)
    assert outer.local_sq_norm().item() == sums.sq_norm_of_mean.item() == ROUNDED(20.5)
    outer.step()
    assert outer.metrics["server_lr"] == ROUNDED(25 / 41)
    assert (half.dtype, double.dtype) == (torch.bfloat16, torch.float64)
    assert double.item() == ROUNDED(1 - 4 * 25 / 41)
    assert half.tolist() == [torch.tensor(1 - 1.5 * 25 / 41).bfloat16().item()] * 2


def test_frozen_parameters_keep_value_and_state() -> None:
    """Momentum 0.5, gradients 1: v = 1, 1.5, 1.75. The second is frozen in the second step."""
    one, two = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    outer = OuterOptimizer([one, two], fx.Momentum(beta=0.5))
    for trains in (True, False, True):
        two.requires_grad_(trains)
        one.grad, two.grad = torch.ones(2), torch.ones(2) if trains else None
        outer.step()
    assert one.tolist() == [-4.25, -4.25]
    assert two.tolist() == [-2.5, -2.5]


def test_a_parameter_without_a_gradient_is_refused() -> None:
    params = parameters()
    outer = OuterOptimizer(params, fx.Average())
    set_mean(outer, updates(0))
    params[2].grad = None
    with pytest.raises(fx.UsageError, match=r"1 of 4 trainable parameters have no \.grad"):
        outer.step()
    outer.zero_grad()
    with pytest.raises(fx.UsageError, match=r"4 of 4 trainable parameters have no \.grad"):
        outer.step()


def test_a_group_that_is_added_begins_with_new_state() -> None:
    """FedExP-M: the numerator S = m + β S / 2 is of the whole model, the momentum of each part."""
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    outer = OuterOptimizer([one], fx.MomentumExP(eps=0.0, beta=0.5))
    one.grad = torch.tensor([2.0])
    outer.set_sums(sq_norm=8.0, count=2)
    outer.step()
    assert (outer.metrics["server_lr"], one.item()) == (1.0, -2.0)  # 8 / (2 · 4)
    outer.add_param_group({"params": [two]})
    one.grad, two.grad = torch.tensor([1.0]), torch.tensor([1.0])
    outer.set_sums(sq_norm=8.0, count=2)
    outer.step()
    assert outer.metrics["server_lr"] == ROUNDED(1.0)  # (8 + 8 / 4) / (2 · (2² + 1²))
    assert (one.item(), two.item()) == (-4.0, -1.0)


def test_lr_is_a_factor_on_the_step_per_group_and_follows_schedulers() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [two], "lr": 0.5}]
    outer = OuterOptimizer(groups, EXP)
    schedule = torch.optim.lr_scheduler.LambdaLR(outer, lambda round: 1.0 / (1 + round))
    for _ in range(2):
        one.grad, two.grad = torch.ones(1), torch.ones(1)
        outer.set_sums(sq_norm=8.0, count=4)  # η = 8 / (2 · 2)
        outer.step()
        schedule.step()
        assert outer.metrics["server_lr"] == ROUNDED(2.0)
    assert (one.item(), two.item()) == (-2.0 - 1.0, -1.0 - 0.5)


def test_the_output_model_is_the_mean_of_the_last_two_iterates() -> None:
    """w_1 after the first step, then the mean of the last two; training continues from the last."""
    params = parameters()
    outer = OuterOptimizer(params, EXP)
    with outer.averaged_parameters():
        assert torch.equal(vector(params), vector(parameters()))
    iterates = []
    for round in range(3):
        take(outer, round)
        iterates.append(vector(params))
        with torch.no_grad():
            params[0].add_(1.0)  # an inner step, which is no part of the output model
        local = vector(params)
        with suppress(KeyError), outer.averaged_parameters():
            assert torch.equal(vector(params), torch.stack(iterates[-2:]).mean(dim=0))
            raise KeyError  # of an evaluation
        assert torch.equal(vector(params), local)
        outer.set_pseudo_gradients(split(iterates[-1]))


def test_rules_without_averaging_keep_no_second_model() -> None:
    params = parameters()
    outer = OuterOptimizer(params, fx.Momentum())
    take(outer, 0)
    assert {name for state in outer.state.values() for name in state} == {"momentum"}
    iterate = vector(params)
    with outer.averaged_parameters():
        assert torch.equal(vector(params), iterate)


def test_a_state_of_another_rule_is_refused() -> None:
    outer, other = (OuterOptimizer(parameters(), rule) for rule in (fx.Momentum(), fx.Adam()))
    take(outer, 0)
    with pytest.raises(fx.UsageError, match="it has momentum, where Adam has first, second"):
        other.load_state_dict(outer.state_dict())
    relative = OuterOptimizer(parameters(), fx.ExP(eps_mode="relative", eps=0.1))
    take(relative, 0)
    with pytest.raises(fx.UsageError, match="it has relative_eps, where ExP has eps"):
        OuterOptimizer(parameters(), EXP).load_state_dict(relative.state_dict())


def test_a_rule_that_needs_more_than_norms_says_so() -> None:
    params = parameters()
    before = vector(params)
    for rule, needed in ((fx.NormalisedAverage(), "work"), (fx.StochasticPolyak(), "envelopes")):
        outer = OuterOptimizer(params, rule)
        set_mean(outer, updates(0))
        with pytest.raises(fx.UsageError, match=f"needs the .*{needed}"):
            outer.step()
    assert torch.equal(vector(params), before)


class Packed(nn.Parameter):
    """A parameter that is not what its numbers are, e.g. quantised or sharded."""


@dataclass(frozen=True)
class OfThree(fx.Average):
    average_last: ClassVar[int] = 3


@pytest.mark.parametrize(
    ("params", "rule", "message"),
    [
        ([torch.zeros(2)], fx.fedexp(), "that of an algorithm is its attribute server"),
        ([torch.zeros(2)], OfThree(), "1 or 2 iterates here, not of 3"),
        ([torch.zeros(2, dtype=torch.int64)], EXP, r"not Tensor of torch\.int64"),
        ([torch.zeros(2, dtype=torch.complex64)], EXP, r"not Tensor of torch\.complex64"),
        ([Packed(torch.zeros(2))], EXP, "not Packed of .*sharded"),
        ([{"params": [torch.zeros(2)], "weight_decay": 0.1}], EXP, "is lr here, not weight_decay"),
    ],
)
def test_what_has_no_meaning_here_is_refused(params: list, rule: object, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        OuterOptimizer(params, rule)  # type: ignore[arg-type]


def test_arguments_of_methods_are_checked() -> None:
    outer = OuterOptimizer(parameters(), EXP)
    with pytest.raises(fx.UsageError, match="takes no closure"):
        outer.step(lambda: 0.0)  # type: ignore[arg-type]
    for start in ([], [torch.zeros(6), *parameters()[1:]]):
        with pytest.raises(fx.UsageError, match="the shapes of the 4 parameters"):
            outer.set_pseudo_gradients(start)


@pytest.mark.parametrize("shared", [lambda p: p, lambda p: p.detach()])
def test_weights_that_change_with_the_parameters_are_no_start(shared: Any) -> None:
    w = nn.Parameter(torch.zeros(3))
    outer = OuterOptimizer([w], fx.Average())
    start = [shared(w)]
    with pytest.raises(fx.UsageError, match=r"use p\.detach\(\)\.clone\(\)"):
        outer.set_pseudo_gradients(start)


@pytest.mark.parametrize("lr", [-1.0, "a", float("nan")])
def test_a_factor_below_zero_is_refused(lr: Any) -> None:
    with pytest.raises(fx.UsageError, match="lr must be a number of at least 0"):
        OuterOptimizer([nn.Parameter(torch.zeros(3))], fx.Average(), lr=lr)
