"""`LocalRule` in loops of every kind: other optimisers, frozen and tied weights, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fedexp.flower import LocalRule
from fedexp.flower.client_state import ClientStore
from fedexp.flower.layout import Layout, named_parts
from fedexp.flower.request import EXTRAS, SHARED, layout_terms
from tests.helpers.problems import BatchNormNet

CONTROL = 0.25
STUDY: dict[str, Any] = {"fedexp.study": "study"}


def asked(model: nn.Module, rule: str = "scaffold", **config: Any) -> tuple[Message, Context]:
    """A train message for this model, with a constant control variate at the server.

    As after the first round, it says how the model is laid out.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    arrays = ArrayRecord(dict(model.state_dict()))
    layout = Layout.of(arrays, *named_parts(model))
    told: dict[str, Any] = {"server-round": 1, "fedexp.client": rule, "fedexp.mu": 0.5}
    told |= layout_terms(layout) | config
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(told)})
    control = np.full(layout.dim, CONTROL, "float32")
    content[SHARED] = ArrayRecord({"control": Array(control)})
    message = Message(content, dst_node_id=7, message_type="train")
    return message, Context(1, 7, {"partition-id": 0}, RecordDict(), {})


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
    local = LocalRule(*asked(model), model, optimizer)
    seen = []
    for _ in range(5):
        step(model, optimizer)
        seen.append(gradients(model) - CONTROL)  # corrected by c - c_i with c_i = 0
    # c_i <- c_i - psi, and psi is what travels
    torch.testing.assert_close(-extras_of(local.reply({})), torch.stack(seen).mean(0))


def test_a_schedule_weighs_the_gradients_by_its_learning_rates() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.02)
    schedule = ExponentialLR(optimizer, 0.5)
    local = LocalRule(*asked(model), model, optimizer)
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
    local = LocalRule(*asked(model), model, optimizer)
    step(model, optimizer)
    seen = gradients(model) - CONTROL
    torch.testing.assert_close(-extras_of(local.reply({})), seen, rtol=1e-3, atol=1e-3)


def test_prox_pulls_back_to_where_the_round_began() -> None:
    model = nn.Linear(4, 2)
    start = model.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(*asked(model, "prox"), model, optimizer)
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
    local = LocalRule(*asked(model, rule), model, optimizer)
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
    LocalRule(*asked(model), model, optimizer)
    model["used"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model["idle"].weight.detach(), before - 0.1 * CONTROL)


def test_tied_weights_are_corrected_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.01)
    local = LocalRule(*asked(model), model, optimizer)
    step(model, optimizer)
    raw = gradients(model) - CONTROL
    torch.testing.assert_close(-extras_of(local.reply({})), raw, rtol=1e-3, atol=1e-3)


def test_no_step_at_all_changes_nothing(state_folder: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(*asked(model, **STUDY), model, optimizer)
    step(model, optimizer)
    local.reply({"num-examples": 3})
    second = asked(model, **STUDY | {"server-round": 2, "fedexp.accepted": 1})
    reply = LocalRule(*second, model, optimizer).reply({"num-examples": 0})
    assert not extras_of(reply).any()
    store = ClientStore.of(state_folder, "study", "0")
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
    local = LocalRule(*asked(model), model, optimizer)
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
    message, context = asked(model)
    model = model.to(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(message, context, model, optimizer)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    reply = local.reply({"num-examples": 1})
    assert {a.dtype for a in reply.content.array_records["arrays"].values()} == {"float32"}
    assert extras_of(reply).dtype == torch.float32


def test_an_optimiser_that_is_kept_is_not_corrected_twice() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    LocalRule(*asked(model), model, optimizer)  # this round failed before its reply
    local = LocalRule(*asked(model), model, optimizer)
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


def test_buffers_travel_and_personal_layers_stay() -> None:
    model = BatchNormNet()
    message, context = asked(model)
    model.register_parameter("personal", nn.Parameter(torch.zeros(3)))
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(message, context, model, optimizer)
    step(model, optimizer)
    arrays = local.reply({"num-examples": 3}).content.array_records["arrays"]
    assert "personal" not in arrays
    assert torch.from_numpy(arrays["norm.running_mean"].numpy()).any()
    assert arrays["norm.num_batches_tracked"].numpy() == 1


def test_the_server_says_which_arrays_it_averages() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("scale", torch.ones(3))
    message, context = asked(model, "scaffold", **{"fedexp.buffers": ["scale"]})
    message.content[SHARED] = ArrayRecord({"control": Array(np.zeros(10, "float32"))})
    optimizer = SGD(model.parameters(), lr=0.1)
    local = LocalRule(message, context, model, optimizer)
    step(model, optimizer)
    reply = local.reply({"num-examples": 3})
    assert extras_of(reply).shape == (10,)
    assert reply.content.array_records["arrays"]["scale"].numpy().tolist() == [1.0, 1.0, 1.0]


def test_a_plain_server_gets_a_plain_reply() -> None:
    model = nn.Linear(4, 2)
    message, context = asked(model)
    del message.content["config"]["fedexp.client"], message.content[SHARED]
    local = LocalRule(message, context, model, SGD(model.parameters(), lr=0.1))
    content = local.reply({"num-examples": 3, "loss": 0.5}).content
    assert set(content) == {"arrays", "metrics"}
    assert dict(content.metric_records["metrics"]) == {"num-examples": 3, "loss": 0.5}
