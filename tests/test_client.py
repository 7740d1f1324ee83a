"""Client rules and local training: reductions, golden values, order of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data.federation import Batch
from fedexp.local import clip_factor, local_step
from fedexp.objective import Buffers, LeastSquares
from tests.helpers.problems import classes_task, least_squares
from tests.helpers.rules import CLIENT_RULES, SERVER_RULES, random_updates, rule_id


def last(task: fx.tasks.Task, algorithm: fx.Algorithm, **options: object) -> fx.Record:
    *_, record = fx.simulate(task, algorithm, **{"rounds": 4, **options})  # type: ignore[arg-type]
    return record


@pytest.mark.parametrize("server", SERVER_RULES, ids=rule_id)
@pytest.mark.parametrize("client", CLIENT_RULES, ids=rule_id)
def test_any_client_rule_runs_with_any_server_rule(
    client: fx.ClientRule, server: fx.ServerRule
) -> None:
    record = last(least_squares(), fx.Algorithm(client=client, server=server), cohort=3)
    assert record.train_loss is not None
    assert np.isfinite(record.train_loss)


def test_prox_with_mu_zero_is_sgd() -> None:
    one = last(least_squares(), fx.Algorithm(client=fx.Prox(0.0)))
    other = last(least_squares(), fx.Algorithm(client=fx.SGD()))
    assert torch.equal(one.state.params, other.state.params)


def test_prox_golden() -> None:
    A, b, mu = np.array([[2.0, 0.0]]), np.array([2.0]), 0.5
    w, start = np.zeros(2), np.zeros(2)
    for _ in range(3):
        w = w - 0.1 * (A.T @ (A @ w - b) + mu * (w - start))
    local = fx.LocalTraining(lr=0.1, steps=3, batch_size=None)
    task = fx.tasks.linear_regression(A[None], b[None])
    record = last(task, fx.fedprox(mu=mu), rounds=1, local=local)
    np.testing.assert_allclose(record.state.params.numpy(), w, rtol=1e-14)


def test_scaffold_golden_over_partial_participation() -> None:
    """Algorithm 2 in numpy, option II, with c updated by |S|/N."""
    task = least_squares(clients=5)
    A = task.train.fields["x"].reshape(5, 3, 20).numpy()
    b = task.train.fields["y"].reshape(5, 3).numpy()
    w, c, ci = np.zeros(20), np.zeros(20), np.zeros((5, 20))
    lr, tau = 0.1, 20
    from fedexp.engine.plan import sample_cohort

    for t in range(1, 5):
        cohort = sample_cohort(0, t, 5, 3)
        deltas, psis = [], []
        for i in cohort:
            x = w.copy()
            for _ in range(tau):
                x = x - lr * (A[i].T @ (A[i] @ x - b[i]) - ci[i] + c)
            deltas.append(w - x)
            psis.append(c - (w - x) / (tau * lr))
            ci[i] = ci[i] - psis[-1]
        w = w - 2.0 * np.mean(deltas, axis=0)
        c = c - len(cohort) / 5 * np.mean(psis, axis=0)
    record = last(task, fx.scaffold(lr=2.0), cohort=3)
    np.testing.assert_allclose(record.state.params.numpy(), w, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(record.state.broadcast["control"].numpy(), c, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(c, ci.mean(0), rtol=1e-11, atol=1e-13)


def test_scaffold_keeps_c_the_weighted_mean_under_size_weights() -> None:
    task = classes_task(lambda: torch.nn.Linear(4, 3))
    record = last(task, fx.scaffold(), cohort=2, rounds=6, weighting="size")
    sizes = torch.from_numpy(task.train.sizes).float()
    total = sum(sizes[i] * state["control"] for i, state in record.state.clients.items())
    torch.testing.assert_close(record.state.broadcast["control"], total / sizes.sum())


def test_local_step_clips_then_decays_then_descends() -> None:
    local = fx.LocalTraining(lr=0.1, clip_norm=1.0, weight_decay=0.5)
    w, g = torch.tensor([2.0, 0.0]), torch.tensor([3.0, 4.0])
    expected = w - 0.1 * (g / 5 + 0.5 * w)
    torch.testing.assert_close(local_step(w, g, 0.1, local), expected)


def test_clipping_is_per_client_and_leaves_short_gradients_alone() -> None:
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped = grads * clip_factor(grads, 1.0)
    assert clipped[0].norm().item() == pytest.approx(1.0)
    assert torch.equal(clipped[1:], grads[1:])
    huge = torch.full((4,), 1e25)
    assert (huge * clip_factor(huge, 10.0)).tolist() == pytest.approx([5.0] * 4)


@pytest.mark.parametrize("norm", [0.0, 0.4, 0.6, 0.999, 1.001, 3.0])
def test_the_clipping_factor_is_exact_near_and_far_from_the_bound(norm: float) -> None:
    grads = torch.full((2, 10_000), norm / 100)
    exact = torch.linalg.vector_norm(grads.double(), dim=1, keepdim=True)
    expected = torch.clamp(1.0 / exact, max=1.0)
    torch.testing.assert_close(clip_factor(grads, 1.0), expected, rtol=1e-13, atol=0)
    mixed = torch.stack([grads[0], torch.full((10_000,), 0.02)])  # one within, one beyond
    assert clip_factor(mixed, 1.0)[1].item() == pytest.approx(0.5)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_step_in_place_gives_the_same_bits(decay: float) -> None:
    w, g = random_updates(2, 50, dtype=torch.float32)
    local = fx.LocalTraining(weight_decay=decay, clip_norm=1.0)
    expected, own = local_step(w, g, 0.1, local), w.clone()
    assert local_step(own, g, 0.1, local, in_place=True) is own
    assert torch.equal(own, expected)


class Bowl(LeastSquares):
    """||w||² / 2, whose gradient is w itself and not a copy of it."""

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return params, buffers


def test_a_gradient_that_is_the_parameters_themselves() -> None:
    task = replace(least_squares(dim=3), objective=Bowl(torch.ones(3, dtype=torch.float64)))
    local = fx.LocalTraining(lr=0.5, steps=2, weight_decay=0.1, batch_size=None)
    state = last(task, fx.fedavg(), rounds=1, local=local, engine="loop", evaluate_every=9).state
    torch.testing.assert_close(state.params, torch.full((3,), (1 - 0.5 - 0.05) ** 2).double())


@pytest.mark.parametrize(("before", "expected"), [(False, [1.0, 0.5]), (True, [0.5, 0.25])])
def test_learning_rate_decay_before_or_after_the_first_round(
    before: bool, expected: list[float]
) -> None:
    local = fx.LocalTraining(lr=1.0, lr_decay=0.5, decay_before_first_round=before)
    assert [local.lr_at(1), local.lr_at(2)] == expected


def test_epochs_decide_the_steps() -> None:
    local = fx.LocalTraining(epochs=2, batch_size=4)
    assert [local.steps_for(n) for n in (1, 4, 5)] == [2, 2, 4]
    assert fx.LocalTraining(epochs=3, batch_size=None).steps_for(7) == 3


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.0}, {"steps": 0}, {"batch_size": 0}, {"clip_norm": -1.0}, {"lr_decay": 1.1},
     {"weight_decay": -1.0}, {"epochs": 0}, {"lr": float("inf")}],
    ids=str,
)  # fmt: skip
def test_local_options_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(fx.UsageError, match=next(iter(options))):
        fx.LocalTraining(**options)


def test_one_client_is_centralised_sgd() -> None:
    """With one client and lr 1 the model is that of torch.optim.SGD."""
    task = classes_task(lambda: torch.nn.Linear(4, 3), sizes=(12,))
    local = fx.LocalTraining(lr=0.1, steps=7, batch_size=None, weight_decay=0.01)
    record = last(task, fx.fedavg(), rounds=2, local=local)
    params, _ = task.objective.initial(0)
    model = torch.nn.Linear(4, 3)
    torch.nn.utils.vector_to_parameters(params, model.parameters())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(14):
        optimiser.zero_grad()
        x, y = task.train.fields["x"], task.train.fields["y"]
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(record.state.params, flat, rtol=1e-5, atol=1e-6)


def unequal_quadratics() -> fx.tasks.Task:
    """Two clients with F_i(w) = (w - c_i)², of which one has ten times the data and steps.

    All examples of a client are the same, so that every batch has the same gradient.
    """
    sizes, centres = (4, 40), (0.0, 1.0)
    y = torch.cat([torch.full((n,), c) for n, c in zip(sizes, centres, strict=True)]).double()
    fields = {"x": torch.ones(len(y), 1, dtype=torch.float64), "y": y}
    return fx.tasks.Task(
        name="unequal",
        objective=LeastSquares(torch.zeros(1, dtype=torch.float64)),
        train=fx.Federation(fields, np.cumsum([0, *sizes])),
        test=None,
        local=fx.LocalTraining(lr=0.002, epochs=1, batch_size=4),
        rounds=300,
    )


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_fednova_reaches_the_optimum_where_fedavg_does_not(engine: str) -> None:
    """The optimum is 1/2; FedAvg weighs the second client by its ten steps, and ends near 10/11."""
    task = unequal_quadratics()
    ends = [
        last(task, algorithm, rounds=None, engine=engine).state.params.item()
        for algorithm in (fx.fedavg(), fx.fednova())
    ]
    assert ends[0] == pytest.approx(10 / 11, abs=0.02)
    assert ends[1] == pytest.approx(1 / 2, abs=0.02)


class LastMean(nn.Module):
    """A model whose buffer is the mean of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=1.0)
        self.head = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


class OnlyLong(fx.ClientRule):
    """A rule that counts only clients of more than two steps."""

    def weight_factor(self, total_lr: Tensor | float) -> Tensor | float:
        return (total_lr > 0.2) * 2.0


@pytest.mark.parametrize("engine", ["loop", "batched", "threads"])
@pytest.mark.parametrize(
    ("algorithm", "weighting", "expected"),
    [
        (fx.fednova(), "uniform", 5.0),  # by p_i / a_i 0.909
        (fx.fednova(), "size", 400 / 44),  # by p_i / a_i 5
        (fx.Algorithm(client=OnlyLong()), "uniform", 10.0),
    ],
)
def test_buffers_are_weighed_by_p(
    engine: str, algorithm: fx.Algorithm, weighting: str, expected: float
) -> None:
    """Means 0 and 10 of two clients, of which one takes one step and the other ten."""
    x = torch.cat([torch.zeros(4, 1), torch.full((40, 1), 10.0)])
    task = fx.supervised(
        "means",
        LastMean,
        fx.Federation({"x": x, "y": torch.arange(44) % 2}, np.array([0, 4, 44])),
        loss=nn.functional.cross_entropy,
        local=fx.LocalTraining(lr=0.1, epochs=1, batch_size=4),
    )
    record = last(task, algorithm, rounds=1, engine=engine, weighting=weighting)
    assert record.state.buffers.averaged[0].item() == pytest.approx(expected, rel=1e-6)


def test_fednova_with_equal_work_is_fedavg() -> None:
    for options in ({}, {"cohort": 3}, {"local": replace(least_squares().local, steps=1)}):
        one = last(least_squares(), fx.fedavg(1.3), **options)
        other = last(least_squares(), fx.fednova(1.3), **options)
        torch.testing.assert_close(one.state.params, other.state.params, rtol=1e-12, atol=1e-14)
        assert other.server_lr == pytest.approx(1.3, rel=1e-12)


def test_fednova_with_another_server_rule_weighs_clients_alike() -> None:
    """FedExP on FedNova's weights: mean and mean squared norm have them both."""
    task = unequal_quadratics()
    mixed = fx.Algorithm("nova-exp", client=fx.Nova(), server=fx.ExP(eps=0.0))
    plain, nova = (last(task, each, rounds=1) for each in (fx.fedexp(eps=0.0), mixed))
    assert nova.metrics["diversity"] > plain.metrics["diversity"]


def test_fednova_sends_two_numbers_more_than_fedavg() -> None:
    task = unequal_quadratics()
    plain, nova = (last(task, each, rounds=1).bytes_up for each in (fx.fedavg(), fx.fednova()))
    assert (plain, nova) == (2 * 8, 2 * 3 * 8)  # two clients, float64


def test_rules_that_add_to_the_sums_are_refused_with_privacy() -> None:
    privacy = fx.privacy.CentralPrivacy(clip=1.0, delta=1e-3, noise_multiplier=1.0)
    for algorithm in (fx.fednova(), fx.fedexprox_stops()):
        with pytest.raises(fx.UsageError, match=r"adds .* to the sums, which privacy does not"):
            fx.simulate(unequal_quadratics(), algorithm, 1, privacy=privacy)


@pytest.mark.parametrize("make", [fx.fedexprox, fx.fedexprox_grads, fx.fedexprox_stops])
@pytest.mark.parametrize("mu", [-1.0, float("nan")])
def test_mu_of_fedexprox_is_checked(make: Callable[..., fx.Algorithm], mu: float) -> None:
    with pytest.raises(fx.UsageError, match="mu must"):
        make(mu=mu)
