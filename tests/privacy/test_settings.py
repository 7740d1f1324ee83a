"""What a user may ask for, what is refused, and what is warned about."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

import fedexp as fx
from fedexp.algorithms import ALGORITHMS
from fedexp.cli.options import parse_privacy
from fedexp.errors import UsageError
from fedexp.plain import privacy_from, privacy_table
from fedexp.privacy import CentralPrivacy, LocalPrivacy, PrivacyWarning
from tests.helpers.problems import least_squares

RUN: dict[str, Any] = {"clients": 1000, "cohort": 100, "rounds": 20, "algorithm": fx.fedexp()}


def test_the_noise_follows_from_epsilon_over_all_rounds() -> None:
    mechanism = CentralPrivacy(clip=1.0, delta=1e-5, epsilon=4.0).prepare(**RUN)
    spent = mechanism.metrics({mechanism.plan(1000, 100): 20}, None)["epsilon"]
    assert spent == pytest.approx(4.0, rel=1e-6)
    assert mechanism.limit == 4.0
    local = LocalPrivacy(clip=1.0, delta=1e-5, epsilon=4.0, rounds=20).prepare(**RUN)
    assert local.metrics({local.plan(9, 3): 20}, None)["epsilon"] == pytest.approx(4.0, rel=1e-6)
    assert local.noise_multiplier == pytest.approx(2 * mechanism.noise_multiplier)


def test_settings_of_ones_own_come_before_those_of_the_run() -> None:
    given = CentralPrivacy(
        1.0, 1e-5, noise_multiplier=2.0, clients=5000, cohort=50, norm_weight=0.4
    )
    mechanism = given.prepare(**RUN)
    assert (mechanism.clients, mechanism.cohort, mechanism.norm_weight) == (5000, 50, 0.4)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_private_or_refused(name: str) -> None:
    """Only rules that extrapolate pay for the squared norms."""
    run = {**RUN, "algorithm": ALGORITHMS[name]()}
    privacy = CentralPrivacy(1.0, 1e-5, noise_multiplier=1.0)
    if name.startswith("scaffold"):
        with pytest.raises(UsageError, match="control variates"):
            privacy.prepare(**run)
    elif name in ("fednova", "fedexprox-stops"):
        with pytest.raises(UsageError, match=r"adds .* to the sums"):
            privacy.prepare(**run)
    else:
        kappa = privacy.prepare(**run).norm_weight
        extrapolates = isinstance(run["algorithm"].server, fx.ExP)
        assert kappa == pytest.approx(0.2 if extrapolates else 0.0)


def test_a_rule_of_a_users_own_is_taken_to_read_the_squared_norms() -> None:
    class Own(fx.Average):
        """May read more than the rule that it derives from."""

    run = {**RUN, "algorithm": fx.Algorithm("own", server=Own())}
    privacy = CentralPrivacy(1.0, 1e-5, noise_multiplier=1.0)
    assert privacy.prepare(**run).norm_weight == pytest.approx(0.2)


@dataclass(frozen=True)
class Weighted(fx.ClientRule):
    """A rule of a user's that adds nothing to the sums but scales the weights."""

    def weight_factor(self, total_lr: Tensor | float) -> float:
        return 100.0


@pytest.mark.parametrize("kind", [CentralPrivacy, LocalPrivacy])
def test_a_rule_that_scales_weights_is_refused(
    kind: type[CentralPrivacy] | type[LocalPrivacy],
) -> None:
    """Its client would count a hundred times as much as the noise covers."""
    run = {**RUN, "algorithm": fx.Algorithm("weighted", client=Weighted(), server=fx.Average())}
    with pytest.raises(UsageError, match="weighted scales the clients' weights"):
        kind(1.0, 1e-5, noise_multiplier=1.0).prepare(**run)


def test_the_numerator_of_the_step_size() -> None:
    for make in (CentralPrivacy, LocalPrivacy):
        chosen = make(1.0, 1e-5, noise_multiplier=1.0, numerator="unbiased")
        assert chosen.prepare(**RUN).numerator == "unbiased"
        assert make(1.0, 1e-5, noise_multiplier=1.0).prepare(**RUN).numerator == "lower-bound"
        assert privacy_from(privacy_table(chosen)) == chosen
        assert "numerator" not in privacy_table(make(1.0, 1e-5, noise_multiplier=1.0))
        with pytest.raises(UsageError, match="numerator is lower-bound or unbiased, not 'upper'"):
            make(1.0, 1e-5, noise_multiplier=1.0, numerator="upper")  # type: ignore[arg-type]
    text = "local:clip=1,delta=1e-5,noise_multiplier=1,numerator=unbiased"
    assert parse_privacy(text) == LocalPrivacy(1.0, 1e-5, 1.0, numerator="unbiased")


@pytest.mark.parametrize("make", [CentralPrivacy, LocalPrivacy])
def test_the_unbiased_numerator_extrapolates_no_less(make: Any) -> None:
    """The first round of two simulations with the same noise."""
    steps = []
    for numerator in (None, "unbiased"):
        privacy = make(0.1, 1e-5, noise_multiplier=0.02, numerator=numerator)
        task = least_squares(clients=20)
        record = next(fx.simulate(task, fx.fedexp(eps=0.0), 1, "all", privacy=privacy))
        steps.append(record.server_lr or 0.0)
    assert 1 < steps[0] < steps[1]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"weighting": "num-examples"}, "leave weighting out"),
        ({"buffers": True}, "GroupNorm"),
        ({"algorithm": fx.scaffold_exp()}, "such as fedexp"),
    ],
)
def test_what_is_not_covered_is_refused(change: dict[str, Any], remedy: str) -> None:
    for privacy in (CentralPrivacy(1.0, 1e-5, 1.0), LocalPrivacy(1.0, 1e-5, 1.0)):
        with pytest.raises(UsageError, match=remedy):
            privacy.prepare(**{**RUN, **change})


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: CentralPrivacy(0.0, 1e-5, 1.0), "median norm"),
        (lambda: CentralPrivacy(1.0, 1.0, 1.0), "1e-5 is usual"),
        (lambda: CentralPrivacy(1.0, 1e-5), "either noise_multiplier or epsilon"),
        (lambda: CentralPrivacy(1.0, 1e-5, 1.0, 1.0), "either noise_multiplier or epsilon"),
        (lambda: CentralPrivacy(1.0, 1e-5, 0.0), "leave privacy out"),
        (lambda: CentralPrivacy(1.0, 1e-5, epsilon=-1.0), "epsilon must be positive"),
        (lambda: CentralPrivacy(1.0, 1e-5, 1.0, norm_weight=0.0), "norm_weight"),
        (lambda: CentralPrivacy(1.0, 1e-5, 1.0, cohort=0), "cohort must be at least 1"),
        (lambda: LocalPrivacy(1.0, 1e-5, epsilon=1.0), "needs rounds too"),
        (lambda: LocalPrivacy(1.0, 1e-5, 1.0, rounds=0), "at least 1"),
        (lambda: LocalPrivacy(1.0, 1e-5, 1.0, noise_seed=1.5), "noise_seed must be a whole"),  # type: ignore[arg-type]
        (lambda: CentralPrivacy(1.0, 1e-5, 1.0, noise_seed="a"), "noise_seed must be a whole"),  # type: ignore[arg-type]
        (lambda: LocalPrivacy(1.0, 1e-5, 1.0, rounds=1.5), "rounds must be a whole number: 1.5"),  # type: ignore[arg-type]
        (lambda: CentralPrivacy("1", 1e-5, 1.0), "clip must be positive and at most 1e30, not '1'"),  # type: ignore[arg-type]
        (lambda: CentralPrivacy(1.0, "1e-5", 1.0), "delta must be in .* not '1e-5'"),  # type: ignore[arg-type]
        (lambda: CentralPrivacy(1.0, 1e-5, "1"), "noise_multiplier must be positive, not '1'"),  # type: ignore[arg-type]
        (lambda: CentralPrivacy(1.0, 1e-5, 1.0, cohort=2.5), "cohort must be a whole number: 2.5"),  # type: ignore[arg-type]
    ],
)
def test_invalid_settings_are_refused(make: Any, remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        make()


def test_a_delta_that_could_publish_a_client_is_warned_about() -> None:
    with pytest.warns(PrivacyWarning, match="1 / 1000 clients"):
        CentralPrivacy(1.0, 1e-3, noise_multiplier=1.0).prepare(**RUN)


def test_without_the_library_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for privacy in (CentralPrivacy(1.0, 1e-5, 1.0), LocalPrivacy(1.0, 1e-5, 1.0)):
        with pytest.raises(UsageError, match=r"pip install 'fedexp\[privacy\]'"):
            privacy.prepare(**RUN)
