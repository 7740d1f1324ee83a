"""Settings that contradict each other are refused in one line, before any round."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import fedexp as fx
import fedexp.flower
from fedexp.errors import UsageError
from fedexp.flower import (
    FedAvgM,
    FedExP,
    FedProx,
    RuleStrategy,
    SecureAggregation,
)
from fedexp.privacy import CentralPrivacy
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.plain_app import first_model, plain_app

PRIVACY = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
ELEVEN: Any = range(11)  # FedAvg's arguments, and the one of Flower's FedProx
SECURE = SecureAggregation(clip=20.0, extras_bound=20.0)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: FedExP(epss=1.0), "did you mean eps"),  # type: ignore[call-arg]
        (lambda: FedExP(eps=-1.0), "eps must not be negative"),
        (lambda: FedExP(weighting="size"), "weighting is uniform or num"),  # type: ignore[arg-type]
        (lambda: FedExP(seed=-1), "seed must be a whole number"),
        (lambda: FedExP(2.0), "fraction_train must be in"),
        (lambda: FedExP(*range(11)), "by name"),
        (lambda: FedAvgM(*range(13)), "by name"),
        (lambda: FedProx(*ELEVEN, proximal_mu=0.1), "given twice"),  # type: ignore[misc]
        (lambda: FedProx(mu=0.1, proximal_mu=0.1), "proximal_mu and mu are one option"),
        (lambda: FedExP(max_norm=0.0), "max_norm must be positive"),
        (lambda: FedExP(min_replies=0), "min_replies must be a whole number"),
        (lambda: FedExP(tied={"a": "b"}).start(FakeGrid(plain_app()), first_model()), "tied names"),
        (lambda: FedExP(max_empty_rounds=0), "max_empty_rounds"),
        (lambda: FedExP(privacy=PRIVACY), "set fraction_evaluate=0.0"),
        (lambda: FedExP().start(FakeGrid(plain_app()), first_model(), 0), "num_rounds"),
        (lambda: FedExP().start(FakeGrid(plain_app()), first_model(), timeout=0), "timeout"),
        (lambda: FedExP().aggregate_train(1, []), "no model yet"),
    ],
)
def test_mistakes_raise_an_error_of_one_line(make: Any, pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_custom_client_rules_are_refused() -> None:
    class Own(fx.ClientRule):
        pass

    with pytest.raises(UsageError, match="not Own"):
        RuleStrategy(algorithm=fx.Algorithm(client=Own()))


def test_bounds_that_cannot_hold_are_refused() -> None:
    with pytest.raises(UsageError, match="max_norm needs updates that the server can see"):
        FedExP(max_norm=1.0, secure=SecureAggregation(clip=1.0))
    privacy = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(UsageError, match="min_replies would let the data decide"):
        FedExP(fraction_evaluate=0.0, min_replies=2, privacy=privacy)


def test_evaluation_with_secure_aggregation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        FedExP(fraction_evaluate=0.0, secure=SECURE)
        assert "in the clear" not in caplog.text
        FedExP(secure=SECURE)
    assert "in the clear, its number of examples too; set fraction_evaluate=0.0" in caplog.text
