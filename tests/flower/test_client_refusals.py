"""`LocalRule` says what is wrong with a loop or a message, in one line that names the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.optim import LBFGS, SGD

from fedexp.errors import UsageError
from fedexp.flower import LocalRule
from fedexp.flower.request import BROADCAST
from tests.flower.test_client_loops import asked, step


def test_an_optimiser_of_another_model() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"made from its parameters"):
        LocalRule(*asked(model), model, SGD(nn.Linear(4, 2).parameters()))


def test_something_that_is_no_optimiser() -> None:
    model: Any = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"optimisers of torch.optim, not a Linear"):
        LocalRule(*asked(model), model, model)


def test_an_optimiser_that_climbs() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"make the optimiser minimise"):
        LocalRule(*asked(model), model, SGD(model.parameters(), maximize=True))


def test_a_model_that_was_not_loaded() -> None:
    model = nn.Linear(4, 2)
    message, context = asked(model)
    with torch.no_grad():
        model.bias.add_(1)
    with pytest.raises(UsageError, match=r"'bias' is not what the server sent; create LocalRule"):
        LocalRule(message, context, model, SGD(model.parameters()))


@pytest.mark.parametrize("rule", ["prox", "scaffold"])
def test_an_optimiser_that_was_not_told(rule: str) -> None:
    model = nn.Linear(4, 2)
    told, untold = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    local = LocalRule(*asked(model, rule), model, told)
    step(model, told, untold)
    with pytest.raises(UsageError, match=r"'bias' was trained without .* every optimiser"):
        local.reply({"num-examples": 1})


def test_two_optimisers_that_were_told() -> None:
    model = nn.Linear(4, 2)
    both = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    local = LocalRule(*asked(model), model, *both)
    step(model, *both)
    assert local.reply({"num-examples": 1}).has_content()


def test_gradients_inside_a_closure() -> None:
    model = nn.Linear(4, 2)
    optimizer = LBFGS(model.parameters())
    LocalRule(*asked(model), model, optimizer)
    with pytest.raises(UsageError, match=r"call backward"):
        optimizer.step(lambda: 0.0)


def test_gradients_that_are_still_scaled() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    LocalRule(*asked(model), model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(UsageError, match=r"unscale_"):
        scaler.step(optimizer)


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    LocalRule(*asked(model), model, optimizer)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"sparse=False"):
        optimizer.step()


def test_a_model_of_other_names_or_shapes() -> None:
    model = nn.Linear(4, 2)
    message, context = asked(model, "sgd")
    with pytest.raises(UsageError, match=r"no 'weight'; .* whose state_dict the server sends"):
        LocalRule(message, context, nn.Sequential(model))
    with pytest.raises(UsageError, match=r"'weight' is \(2, 5\) here, but \(2, 4\) at"):
        LocalRule(message, context, nn.Linear(5, 2))


def test_a_rule_that_this_version_does_not_know() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"unknown client rule 'feddyn'"):
        LocalRule(*asked(model, "feddyn"), model, SGD(model.parameters()))


@pytest.mark.parametrize("key", ["server-round", "fedexp.accepted"])
def test_numbers_that_are_none(key: str) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=f"{key}=-1"):
        LocalRule(*asked(model, "scaffold", **{key: -1}), model)


def test_a_server_that_does_not_send_its_control_variate() -> None:
    model = nn.Linear(4, 2)
    message, context = asked(model)
    del message.content[BROADCAST]
    with pytest.raises(UsageError, match=r"use a strategy of fedexp.flower there"):
        LocalRule(message, context, model)


def test_a_message_with_two_models() -> None:
    model = nn.Linear(4, 2)
    message, context = asked(model)
    message.content["more"] = ArrayRecord(dict(model.state_dict()))
    with pytest.raises(UsageError, match=r"2 records with a model"):
        LocalRule(message, context, model)


def test_a_server_that_does_not_count_its_rounds() -> None:
    model = nn.Linear(4, 2)
    message, context = asked(model)
    del message.content["config"]["server-round"]
    with pytest.raises(UsageError, match=r"let the server send server-round"):
        LocalRule(message, context, model)
