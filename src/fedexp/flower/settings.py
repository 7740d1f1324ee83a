"""`Settings`: what a strategy adds to FedAvg's arguments, and FedAvg's own, checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, get_args

import torch
from flwr.supercore import log

from fedexp.algorithms import Algorithm
from fedexp.client import SGD, ClientRule, Prox, Scaffold
from fedexp.errors import UsageError, require
from fedexp.flower.replies import Weighting
from fedexp.flower.secure_payload import SecureAggregation
from fedexp.privacy import Privacy

CLIENT_RULES: dict[type[ClientRule], str] = {SGD: "sgd", Prox: "prox", Scaffold: "scaffold"}


@dataclass(frozen=True)
class Settings:
    """How a strategy trains.

    Args:
        algorithm: a client rule and a server rule.
        weighting: "uniform" as in the paper, or "num-examples" as in Flower's FedAvg; the same
            weights enter the mean and the mean squared norm.
        seed: of the cohorts.
        buffers: names of the arrays that are averaged and never extrapolated; when None, what
            clients with `LocalRule` report, and BatchNorm's statistics of those that do not.
        tied: for each further name of a parameter, its first name; when None, what clients report,
            and of those that do not, arrays that are equal before and after training.
        checkpoint: a folder that keeps the run, and from which it goes on; None keeps nothing.
        name: what the run is called in its folder and in reports.
        total_clients: how many clients there are, for SCAFFOLD; when None, the most nodes seen.
        wait_for_nodes: seconds to wait for enough nodes; the timeout of `start` when None.
        max_empty_rounds: rounds in a row without a usable reply after which the run ends.
        max_norm: replies whose update has a larger norm are left out; None for no bound.
        min_replies: usable replies that a round needs; with fewer the model stays as it is, and the
            round counts as empty.
        identify: whether to ask nodes who they are; when None, only where clients keep state or
            with privacy, because a ClientApp without `identify(app)` logs such a question as an
            error.
        privacy: `CentralPrivacy` or `LocalPrivacy` of `fedexp.privacy`.
        secure: `SecureAggregation`, to sum updates without seeing them.
    """

    algorithm: Algorithm
    weighting: Weighting = "uniform"
    seed: int = 0
    buffers: Collection[str] | None = None
    checkpoint: str | Path | None = None
    name: str = "flower"
    total_clients: int | None = None
    wait_for_nodes: float | None = None
    max_empty_rounds: int = 3
    privacy: Privacy | None = None
    secure: SecureAggregation | None = None
    tied: Mapping[str, str] | None = None
    max_norm: float | None = None
    min_replies: int = 1
    identify: bool | None = None

    def __post_init__(self) -> None:
        rule = self.algorithm.client
        require(
            type(rule) in CLIENT_RULES,
            f"clients on Flower know the rules SGD, Prox and Scaffold, not {type(rule).__name__}",
        )
        require(
            self.weighting in get_args(Weighting),
            f"weighting is uniform or num-examples, not {self.weighting!r}",
        )
        wholes = {"seed": 0, "max_empty_rounds": 1, "total_clients": 1, "min_replies": 1}
        for name, least in wholes.items():
            value = getattr(self, name)
            sound = value is None or (isinstance(value, int) and value >= least)
            require(sound, f"{name} must be a whole number from {least} on, not {value!r}")
        if self.secure is not None and self.privacy is not None:
            raise UsageError("secure and privacy do not go together yet; leave one of them out")
        bound = self.max_norm
        require(
            bound is None or (math.isfinite(bound) and bound > 0),
            f"max_norm must be positive and finite, not {bound}",
        )
        require(
            bound is None or self.secure is None,
            "max_norm needs updates that the server sees; leave it out: the clip of "
            "SecureAggregation bounds them",
        )
        require(
            self.min_replies == 1 or self.privacy is None or self.privacy.noised_by_clients,
            "min_replies would decide by the data whether noise is released; leave it out with "
            "central privacy",
        )

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep something between rounds (SCAFFOLD's control variates)."""
        return bool(self.algorithm.client.init_client_state(torch.zeros(0)))

    def client_config(self) -> dict[str, Any]:
        """Return the settings of the client rule that clients receive."""
        rule = self.algorithm.client
        config: dict[str, Any] = {"fedexp.client": CLIENT_RULES[type(rule)]}
        if isinstance(rule, Prox):
            config["fedexp.mu"] = config["proximal-mu"] = rule.mu
        if self.buffers is not None:
            config["fedexp.buffers"] = sorted(self.buffers)
        return config


def default_weighting(privacy: Privacy | None, secure: SecureAggregation | None) -> Weighting:
    """Return how clients weigh unless the user says: as in Flower, by `weighted_by_key`; the same
    where a client's share must be bounded or hidden."""
    return "num-examples" if privacy is None and secure is None else "uniform"


def check_shares(**values: float) -> None:
    """Refuse fractions and numbers of nodes that cannot be meant."""
    for name, value in values.items():
        if name.startswith("fraction"):
            require(0 <= value <= 1, f"{name} must lie in [0, 1], not {value}")
        else:
            require(value >= 0, f"{name} must not be negative, but is {value}")


def check_covered(
    privacy: Privacy | None, secure: SecureAggregation | None, fraction_evaluate: float
) -> None:
    """Refuse a private run whose clients tell exact measurements of their data; warn of a secure
    one, whose server sees those of each client."""
    require(
        privacy is None or fraction_evaluate == 0,
        "privacy does not cover what clients measure in an evaluation; set fraction_evaluate=0.0, "
        "and evaluate on the server by evaluate_fn",
    )
    if secure is not None and fraction_evaluate > 0:
        log(
            WARNING,
            "secure aggregation does not cover evaluation: what each client measures reaches the "
            "server in the clear, its number of examples too; set fraction_evaluate=0.0",
        )
