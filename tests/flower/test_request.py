"""Train messages that a client refuses, each in a line."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord
from torch import nn
from torch.optim import SGD

from fedexp.errors import UsageError
from fedexp.flower import LocalRule
from fedexp.flower.request import BROADCAST
from tests.flower.helpers.rounds import train_message


def test_a_rule_that_this_version_does_not_know() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"unknown client rule 'feddyn'"):
        LocalRule(*train_message(model, "feddyn"), model, SGD(model.parameters()))


@pytest.mark.parametrize("key", ["server-round", "fedexp.accepted"])
def test_numbers_that_are_none(key: str) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=f"{key}=-1"):
        LocalRule(*train_message(model, "scaffold", **{key: -1}), model)


def test_a_server_that_does_not_send_its_control_variate() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model)
    del message.content[BROADCAST]
    with pytest.raises(UsageError, match=r"use a strategy of fedexp.flower there"):
        LocalRule(message, context, model)


def test_a_message_with_two_models() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model)
    message.content["more"] = ArrayRecord(dict(model.state_dict()))
    with pytest.raises(UsageError, match=r"2 records with a model"):
        LocalRule(message, context, model)


def test_a_server_that_does_not_count_its_rounds() -> None:
    model = nn.Linear(4, 2)
    message, context = train_message(model)
    del message.content["config"]["server-round"]
    with pytest.raises(UsageError, match=r"let the server send server-round"):
        LocalRule(message, context, model)
