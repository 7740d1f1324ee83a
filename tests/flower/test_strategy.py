"""Settings that contradict each other are refused in one line, before any round."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import nn

import fedexp as fx
import fedexp.flower
from fedexp.errors import UsageError
from fedexp.flower import (
    FedAvgM,
    FedExP,
    FedProx,
    RuleStrategy,
    Scaffold,
    SecureAggregation,
    local_privacy,
)
from fedexp.privacy import CentralPrivacy, LocalPrivacy, PrivacyWarning
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.plain_app import first_model, plain_app

PRIVACY = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
ELEVEN: Any = range(11)  # FedAvg's arguments, and the one of Flower's FedProx
SECURE = SecureAggregation(clip=20.0, extras_bound=20.0)


def start(**options: Any) -> None:
    given = {"grid": FakeGrid(plain_app()), "initial_arrays": first_model(), **options}
    FedExP().start(**given)


def private(make: Any = FedExP, **options: Any) -> RuleStrategy:
    return make(fraction_evaluate=0.0, **options)


class Saves(FedExP):
    """Saves the model of every round, where a strategy of Flower would."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return arrays, metrics


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: FedExP(epss=1.0), "did you mean eps"),  # type: ignore[call-arg]
        (lambda: FedExP(eps=-1.0), "eps must not be negative"),
        (lambda: FedExP(weighting="size"), "weighting is uniform or num"),  # type: ignore[arg-type]
        (lambda: FedExP(seed=-1), "seed must be at least 0"),
        (lambda: FedExP(2.0), "fraction_train must be in"),
        (lambda: FedExP(*range(11)), "by name"),
        (lambda: RuleStrategy(algoritm=fx.fedexp()), "did you mean algorithm"),  # type: ignore[call-arg]
        (lambda: FedAvgM(*range(13)), "by name"),
        (lambda: FedProx(*ELEVEN, proximal_mu=0.1), "multiple values for argument 'prox"),
        (lambda: FedProx(mu=0.1, proximal_mu=0.1), "proximal_mu and mu are one option"),
        (lambda: FedExP(max_norm=0.0), "max_norm must be positive"),
        (lambda: FedExP(min_replies=0.5), "min_replies must be a whole"),  # type: ignore[arg-type]
        (lambda: FedExP(min_replies=3, quorum=2), "quorum must be at least 3, not 2"),
        (lambda: FedExP(evaluate_every=0), "evaluate_every must be at least 1"),
        (lambda: FedExP(tied={"a": "b"}).start(FakeGrid(plain_app()), first_model()), "tied names"),
        (lambda: FedExP(max_empty_rounds=0), "max_empty_rounds"),
        (lambda: FedExP(privacy=PRIVACY), "set fraction_evaluate=0.0"),
        (lambda: FedExP().start(FakeGrid(plain_app()), first_model(), -1), "num_rounds"),
        (lambda: FedExP().start(FakeGrid(plain_app()), first_model(), timeout=0), "timeout"),
        (lambda: FedExP().aggregate_train(1, []), "no model yet"),
        (lambda: FedExP(eps="0.1"), "eps must be a number, not '0.1'"),  # type: ignore[arg-type]
        (lambda: FedAvgM(lr="1"), "lr must be positive and finite, not '1'"),  # type: ignore[arg-type]
        (
            lambda: RuleStrategy(algorithm=fx.Algorithm(server_schedule="linear")),
            "server_schedule needs the simulator; leave it out on Flower",
        ),
        (lambda: start(num_rounds="3"), "num_rounds must be a whole number: '3'"),
        (lambda: start(timeout="9"), "timeout must be a positive number of seconds, not 9"),
        (lambda: start(initial_arrays=None), r"ArrayRecord\(model.state_dict\(\)\)"),
        (lambda: private(privacy=0.5), "privacy must be CentralPrivacy"),
        (lambda: private(privacy=CentralPrivacy), "privacy must be CentralPrivacy"),
        (lambda: private(secure=True), "secure must be SecureAggregation"),
        (lambda: FedExP(model=nn.Linear), r"model=Net\(\)"),  # type: ignore[arg-type]
        (lambda: private(privacy=PRIVACY, weighting="num-examples"), "only with uniform weights"),
        (lambda: private(Scaffold, privacy=PRIVACY), "control variates"),
        (lambda: private(Saves, secure=SECURE), "leave aggregate_train as it is"),
        (lambda: private(secure=SECURE, weighting="num-examples"), "use weighting='uniform'"),
        (lambda: FedExP(checkpoint=3), "checkpoint must be a folder"),  # type: ignore[arg-type]
        (lambda: FedExP(wait_for_nodes="9"), "wait_for_nodes must be a number"),  # type: ignore[arg-type]
        (lambda: FedExP(max_norm="9"), "max_norm must be positive"),  # type: ignore[arg-type]
        (lambda: FedExP(fraction_train="all"), "fraction_train must be a number"),  # type: ignore[arg-type]
        (lambda: start(evaluate_fn=lambda round, arrays: 0.5), r"return a MetricRecord, such as"),
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
    for guarded in ({"privacy": privacy}, {"secure": SECURE}):
        with pytest.raises(UsageError, match="quorum lets one reply decide"):
            private(quorum=2, **guarded)
    local = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)
    assert private(quorum=2, privacy=local).settings.quorum == 2


def test_noise_that_can_be_subtracted_is_not_taken_for_private() -> None:
    """Settings that were simulated with a seed are easily deployed with it."""
    central = CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0, noise_seed=0)
    local = LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0, noise_seed=0)
    for make in (lambda: private(privacy=central), lambda: local_privacy(local)):
        with pytest.warns(PrivacyWarning, match="leave noise_seed out") as warned:
            make()
        assert len(warned) == 1


def test_evaluation_with_secure_aggregation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        FedExP(fraction_evaluate=0.0, secure=SECURE)
        assert "in the clear" not in caplog.text
        FedExP(secure=SECURE)
    assert "in the clear, its number of examples too; set fraction_evaluate=0.0" in caplog.text
