"""`LocalRule`: the simulator's rounds from a user's own loop, any optimiser, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import fedexp as fx
from fedexp.data.federation import Batch
from fedexp.engine.plan import sample_cohort
from fedexp.errors import UsageError
from fedexp.flower import LocalRule, initial_arrays
from fedexp.flower.client_state import ClientStateFolder
from fedexp.flower.request import BROADCAST, EXTRAS
from fedexp.flower.simulated_client import from_arrays
from fedexp.tasks import Task
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.rounds import CONTROL, Rounds, train_message
from tests.flower.helpers.user_app import (
    LR,
    float64_task,
    uniform_strategy,
    user_app,
)
from tests.helpers.problems import BatchNormNet

ALGORITHMS = [fx.fedexp(), fx.fedprox_exp(mu=0.5), fx.scaffold(), fx.scaffold_exp()]
CLIP = 0.3
CLOSE = 1e-10
STUDY: dict[str, Any] = {"fedexp.api": "study"}


def clipping_loop(
    model: nn.Module, optimizer: Optimizer, local: LocalRule, batches: Iterator[Batch]
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        local.correct()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def bare_loop(
    model: nn.Module, optimizer: Optimizer, local: LocalRule, batches: Iterator[Batch]
) -> None:
    for batch in batches:
        model.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        local.correct()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(LR * param.grad)
        local.took_step(LR)


def decaying_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR, weight_decay=0.1)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("cohort", [None, 2])
def test_an_unchanged_loop_gives_the_rounds_of_the_simulator(
    algorithm: fx.Algorithm, cohort: int | None
) -> None:
    task = float64_task()
    rounds = Rounds(FakeGrid(user_app(task), 4), algorithm, initial_arrays(task))
    for record in fx.simulate(task, algorithm, rounds=4, cohort=cohort, engine="loop"):
        metrics = rounds.run(sample_cohort(0, record.round, 4, cohort).tolist())
        assert_same(rounds, task, record)
        assert metrics["server_lr"] == pytest.approx(record.server_lr, rel=1e-9)


def assert_same(rounds: Rounds, task: Task, record: fx.Record) -> None:
    params, buffers = from_arrays(task, rounds.server.model())
    torch.testing.assert_close(params, record.state.params, rtol=1e-10, atol=1e-10)
    averaged = record.state.buffers.averaged
    torch.testing.assert_close(buffers.averaged, averaged, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_clipping_and_weight_decay_in_the_order_of_the_paper(algorithm: fx.Algorithm) -> None:
    task = float64_task()
    task = replace(task, local=replace(task.local, clip_norm=CLIP, weight_decay=0.1))
    app = user_app(task, decaying_sgd, clipping_loop)
    rounds = Rounds(FakeGrid(app, 4), algorithm, initial_arrays(task))
    for record in fx.simulate(task, algorithm, rounds=3, engine="loop"):
        rounds.run(range(4))
        # torch divides by norm + 1e-6 when it clips
        params, _ = from_arrays(task, rounds.server.model())
        torch.testing.assert_close(params, record.state.params, rtol=2e-5, atol=2e-5)


def test_a_loop_without_an_optimiser() -> None:
    task = float64_task()
    apps = [user_app(task), user_app(task, loop=bare_loop, bare=True)]
    usual, bare = (Rounds(FakeGrid(app, 4), fx.scaffold(), initial_arrays(task)) for app in apps)
    for _ in range(3):
        usual.run(range(4))
        bare.run(range(4))
    ours, theirs = bare.server.state.params, usual.server.state.params
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(), fx.fedprox_exp(mu=0.5), fx.scaffold_exp()], ids=lambda a: a.name
)
def test_a_users_loop_on_half_of_the_nodes_is_the_simulator(algorithm: fx.Algorithm) -> None:
    task = float64_task()
    made = uniform_strategy(algorithm, fraction_train=0.5)
    result = made.start(FakeGrid(user_app(task), 4), initial_arrays(task), num_rounds=4)
    records = list(fx.simulate(task, algorithm, rounds=4, cohort=2, engine="loop"))
    steps = [result.train_metrics_clientapp[r.round]["server_lr"] for r in records]
    assert steps == pytest.approx([r.server_lr for r in records], rel=1e-9)
    assert result.arrays is not None
    params, buffers = from_arrays(task, result.arrays)
    expected, others = records[-1].state.output()
    torch.testing.assert_close(params, expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(buffers.averaged, others.averaged, rtol=CLOSE, atol=CLOSE)


def extras_of(reply: Message) -> Tensor:
    return torch.from_numpy(reply.content.array_records[EXTRAS]["control"].numpy())


def step(model: nn.Module, *optimizers: Optimizer, shape: int = 4) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.ones(3, shape)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: SGD(ps, lr=0.01),
        lambda ps: SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
        lambda ps: Adam(ps, lr=0.01),
        lambda ps: AdamW(ps, lr=0.01, weight_decay=0.5),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_a_control_variate_is_the_mean_gradient_whatever_the_optimiser(
    make: Callable[[Any], Optimizer],
) -> None:
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())
    local = LocalRule(*train_message(model), model, optimizer)
    seen = []
    for _ in range(5):
        step(model, optimizer)
        seen.append(gradients(model) - CONTROL)  # corrected by c - c_i with c_i = 0
    # c_i <- c_i - psi, and psi is what is sent
    torch.testing.assert_close(-extras_of(local.reply({})), torch.stack(seen).mean(0))


def test_a_schedule_weighs_the_gradients_by_its_learning_rates() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.02)
    schedule = ExponentialLR(optimizer, 0.5)
    local = LocalRule(*train_message(model), model, optimizer)
    seen, rates = [], torch.tensor([0.02, 0.01, 0.005])
    for _ in rates:
        step(model, optimizer)
        seen.append(gradients(model) - CONTROL)
        schedule.step()
    mean = (rates @ torch.stack(seen)) / rates.sum()
    torch.testing.assert_close(-extras_of(local.reply({})), mean, rtol=1e-4, atol=1e-4)


def test_groups_with_learning_rates_of_their_own() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.001}])
    local = LocalRule(*train_message(model), model, optimizer)
    step(model, optimizer)
    seen = gradients(model) - CONTROL
    torch.testing.assert_close(-extras_of(local.reply({})), seen, rtol=1e-3, atol=1e-3)


def test_prox_pulls_back_to_where_the_round_began() -> None:
    model = nn.Linear(4, 2)
    start = model.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(*train_message(model, "prox"), model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()  # the gradient of the weight is one everywhere
        optimizer.step()
    second = 1 + 0.5 * (-0.1)
    torch.testing.assert_close(model.weight.detach(), start - 0.1 * (1 + second))
    assert EXTRAS not in local.reply({"num-examples": 1}).content


@pytest.mark.parametrize("rule", ["prox", "scaffold"])
def test_frozen_parameters_stay_and_add_nothing(rule: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(*train_message(model, rule), model, optimizer)
    step(model, optimizer)
    reply = local.reply({"num-examples": 3})
    assert torch.equal(model[0].weight, before)
    if rule == "scaffold":
        frozen = 4 * 6 + 6
        assert not extras_of(reply)[:frozen].any()
        assert extras_of(reply)[frozen:].all()


def test_a_parameter_without_gradient_is_corrected_as_in_the_simulator() -> None:
    model: Any = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
    before = model["idle"].weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    LocalRule(*train_message(model), model, optimizer)
    model["used"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model["idle"].weight.detach(), before - 0.1 * CONTROL)


def test_tied_weights_are_corrected_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.01)
    local = LocalRule(*train_message(model), model, optimizer)
    step(model, optimizer)
    raw = gradients(model) - CONTROL
    torch.testing.assert_close(-extras_of(local.reply({})), raw, rtol=1e-3, atol=1e-3)


def test_no_step_at_all_changes_nothing(state_folder: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(*train_message(model, **STUDY), model, optimizer)
    step(model, optimizer)
    local.reply({"num-examples": 3})
    second = train_message(model, **STUDY | {"server-round": 2, "fedexp.accepted": 1})
    reply = LocalRule(*second, model, optimizer).reply({"num-examples": 0})
    assert not extras_of(reply).any()
    store = ClientStateFolder.of(state_folder, "study", "0")
    first, later = store.load(1), store.load(2)
    assert first is not None
    assert later is not None
    assert first["control"].any()
    assert torch.equal(first["control"], later["control"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("finite", [True, False])
def test_a_scaler_skips_and_unscales(finite: bool, fused: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
    local = LocalRule(*train_message(model), model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.full((1, 4), 1.0 if finite else torch.inf)
    scaler.scale(model(x).sum()).backward()
    if fused:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    expected = -torch.ones(10) if finite else torch.zeros(10)
    torch.testing.assert_close(extras_of(local.reply({})), expected, rtol=1e-5, atol=1e-5)


def test_a_model_in_half_precision_replies_in_the_types_it_was_sent() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model)
    model = model.to(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(message, context, model, optimizer)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    reply = local.reply({"num-examples": 1})
    assert {a.dtype for a in reply.content.array_records["arrays"].values()} == {"float32"}
    assert extras_of(reply).dtype == torch.float32


def test_an_optimiser_that_is_reused_is_not_corrected_twice() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    LocalRule(*train_message(model), model, optimizer)  # this round failed before its reply
    local = LocalRule(*train_message(model), model, optimizer)
    before = model.bias.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.bias.detach(), before - 0.1 * (1 + CONTROL))
    local.reply({})
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()  # the round is over: nothing is corrected any more
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [1.0, 1.0]


def test_buffers_are_sent_and_personal_layers_are_not() -> None:
    model = BatchNormNet()
    message, context = train_message(model)
    model.register_parameter("personal", nn.Parameter(torch.zeros(3)))
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(message, context, model, optimizer)
    step(model, optimizer)
    arrays = local.reply({"num-examples": 3}).content.array_records["arrays"]
    assert "personal" not in arrays
    assert torch.from_numpy(arrays["norm.running_mean"].numpy()).any()
    assert arrays["norm.num_batches_tracked"].numpy() == 1


def test_the_server_decides_which_arrays_it_averages() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("scale", torch.ones(3))
    message, context = train_message(model, "scaffold", **{"fedexp.buffers": ["scale"]})
    message.content[BROADCAST] = ArrayRecord({"control": Array(np.zeros(10, "float32"))})
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(message, context, model, optimizer)
    step(model, optimizer)
    reply = local.reply({"num-examples": 3})
    assert extras_of(reply).shape == (10,)
    assert reply.content.array_records["arrays"]["scale"].numpy().tolist() == [1.0, 1.0, 1.0]


def test_a_plain_server_gets_a_plain_reply() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model)
    del message.content["config"]["fedexp.client"], message.content[BROADCAST]
    local = LocalRule(message, context, model, SGD(model.parameters(), lr=0.1))
    content = local.reply({"num-examples": 3, "loss": 0.5}).content
    assert set(content) == {"arrays", "metrics"}
    assert dict(content.metric_records["metrics"]) == {"num-examples": 3, "loss": 0.5}


def test_an_optimiser_of_another_model() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"made from its parameters"):
        LocalRule(*train_message(model), model, SGD(nn.Linear(4, 2).parameters()))


def test_something_that_is_no_optimiser() -> None:
    model: Any = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"optimisers of torch.optim, not a Linear"):
        LocalRule(*train_message(model), model, model)


def test_an_optimiser_that_climbs() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"make the optimiser minimise"):
        LocalRule(*train_message(model), model, SGD(model.parameters(), maximize=True))


def test_a_model_that_was_not_loaded() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model)
    with torch.no_grad():
        model.bias.add_(1)
    with pytest.raises(UsageError, match=r"'bias' is not what the server sent; create LocalRule"):
        LocalRule(message, context, model, SGD(model.parameters()))


@pytest.mark.parametrize("rule", ["prox", "scaffold"])
def test_an_optimiser_that_was_not_given(rule: str) -> None:
    model = nn.Linear(4, 2)
    given, other = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    local = LocalRule(*train_message(model, rule), model, given)
    step(model, given, other)
    with pytest.raises(UsageError, match=r"'bias' was trained without .* every optimiser"):
        local.reply({"num-examples": 1})


def test_two_optimisers_that_were_given() -> None:
    model = nn.Linear(4, 2)
    both = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    local = LocalRule(*train_message(model), model, *both)
    step(model, *both)
    assert local.reply({"num-examples": 1}).has_content()


def test_gradients_inside_a_closure() -> None:
    model = nn.Linear(4, 2)
    optimizer = LBFGS(model.parameters())
    LocalRule(*train_message(model), model, optimizer)
    with pytest.raises(UsageError, match=r"call backward"):
        optimizer.step(lambda: 0.0)


def test_gradients_that_are_still_scaled() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    LocalRule(*train_message(model), model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(UsageError, match=r"unscale_"):
        scaler.step(optimizer)


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    LocalRule(*train_message(model), model, optimizer)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"sparse=False"):
        optimizer.step()


def test_a_model_of_other_names_or_shapes() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model, "sgd")
    with pytest.raises(UsageError, match=r"no 'weight'; .* whose state_dict the server sends"):
        LocalRule(message, context, nn.Sequential(model))
    with pytest.raises(UsageError, match=r"'weight' is \(2, 5\) here, but \(2, 4\) at"):
        LocalRule(message, context, nn.Linear(5, 2))
