"""`Settings`: the arguments that strategies of this package add to those of Flower's FedAvg."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import WARNING
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
from flwr.supercore import log

from fedexp.algorithms import Algorithm
from fedexp.client import SGD, ClientRule, Prox, Scaffold
from fedexp.errors import UsageError, is_number, require
from fedexp.flower.replies import Weighting
from fedexp.flower.secure.payload import NOT_UNIFORM, SecureAggregation
from fedexp.privacy import Privacy
from fedexp.privacy.settings import check_fit, warn_seeded

CLIENT_RULES: dict[type[ClientRule], str] = {SGD: "sgd", Prox: "prox", Scaffold: "scaffold"}


@dataclass(frozen=True)
class Settings:
    """How a strategy trains.

    Args:
        algorithm: a client rule and a server rule.
        weighting: "uniform" as in the paper, or "num-examples" as in Flower's FedAvg; the same
            weights enter the mean and the mean squared norm.
        seed: decides the cohorts.
        buffers: names of the arrays that are averaged and never extrapolated; when None, what
            clients with `LocalRule` report, else the statistics of BatchNorm.
        tied: maps each further name of a parameter to its first name; when None, what clients
            report, else arrays that are equal before and after training.
        checkpoint: folder in which the run is stored, and from which it resumes; None for none.
        name: of the task in the run folder and in reports.
        total_clients: number of clients, for SCAFFOLD; when None, and at least, the most seen.
        wait_for_nodes: seconds to wait for enough nodes; the timeout of `start` when None.
        max_empty_rounds: rounds in a row without a usable reply after which the run ends.
        max_norm: replies whose update has a larger norm are left out; None for no bound.
        min_replies: usable replies that a round needs; with fewer the model is unchanged, and the
            round counts as empty.
        query_client_ids: whether to query nodes for their client id; when None, only for rules
            with client state and with privacy, because a ClientApp without
            `report_client_id(app)` logs the query as an error.
        privacy: `CentralPrivacy` or `LocalPrivacy` of `fedexp.privacy`.
        secure: `SecureAggregation`, so that the server sees sums of updates only.
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
    query_client_ids: bool | None = None

    def __post_init__(self) -> None:
        rule = self.algorithm.client
        require(
            type(rule) in CLIENT_RULES,
            f"on Flower the client rule is SGD, Prox or Scaffold, not {type(rule).__name__}; use "
            "one of these, or simulate",
        )
        require(
            self.weighting in get_args(Weighting),
            f"weighting is uniform or num-examples, not {self.weighting!r}",
        )
        least_values = {"seed": 0, "max_empty_rounds": 1, "total_clients": 1, "min_replies": 1}
        for name, least in least_values.items():
            value = getattr(self, name)
            valid = value is None or (isinstance(value, int) and value >= least)
            require(valid, f"{name} must be a whole number of at least {least}, not {value!r}")
        require(
            self.secure is None or isinstance(self.secure, SecureAggregation),
            f"secure must be SecureAggregation(clip=...), not {self.secure!r}",
        )
        require(self.secure is None or self.weighting == "uniform", NOT_UNIFORM)
        require(
            self.checkpoint is None or isinstance(self.checkpoint, str | PathLike),
            f"checkpoint must be a folder, checkpoint='runs/first', not {self.checkpoint!r}",
        )
        wait = self.wait_for_nodes
        require(
            wait is None or (isinstance(wait, Real) and wait >= 0),
            f"wait_for_nodes must be a number of seconds, not {wait!r}",
        )
        if self.privacy is not None:
            require(
                isinstance(self.privacy, Privacy) and not isinstance(self.privacy, type),
                f"privacy must be CentralPrivacy(...) or LocalPrivacy(...), not {self.privacy!r}",
            )
            check_fit(self.algorithm, self.weighting, buffers=False)
            warn_seeded(self.privacy)
        if self.secure is not None and self.privacy is not None:
            raise UsageError("secure and privacy cannot be combined yet; leave one of them out")
        bound = self.max_norm
        require(
            bound is None or (is_number(bound) and bound > 0),
            f"max_norm must be positive and finite, not {bound!r}",
        )
        require(
            bound is None or self.secure is None,
            "max_norm needs updates that the server can see; leave it out: the clip of "
            "SecureAggregation bounds them",
        )
        require(
            self.min_replies == 1 or self.privacy is None or self.privacy.noised_by_clients,
            "min_replies would let the data decide whether noise is released; leave it out with "
            "central privacy",
        )

    @property
    def stateful_clients(self) -> bool:
        """Return whether the rule has client state (SCAFFOLD's control variates)."""
        return bool(self.algorithm.client.init_client_state(torch.zeros(0)))

    @property
    def fixes_layout(self) -> bool:
        """Return whether noise or masks depend on the layout, so that it cannot change later."""
        return self.privacy is not None or self.secure is not None

    @property
    def queries_client_ids(self) -> bool:
        """Return whether nodes are queried for their client ids."""
        if self.query_client_ids is not None:
            return self.query_client_ids
        return self.stateful_clients or self.privacy is not None

    def client_config(self) -> dict[str, Any]:
        """Return the config of the client rule, as train messages carry it."""
        rule = self.algorithm.client
        config: dict[str, Any] = {"fedexp.client": CLIENT_RULES[type(rule)]}
        if isinstance(rule, Prox):
            config["fedexp.mu"] = config["proximal-mu"] = rule.mu
        if self.buffers is not None:
            config["fedexp.buffers"] = sorted(self.buffers)
        return config


def default_weighting(privacy: Privacy | None, secure: SecureAggregation | None) -> Weighting:
    """Return "num-examples" as in Flower; "uniform" where a client's share must be bounded or
    hidden."""
    return "num-examples" if privacy is None and secure is None else "uniform"


def check_fractions(**values: float) -> None:
    """Refuse fractions outside [0, 1] and negative numbers of nodes."""
    for name, value in values.items():
        require(is_number(value), f"{name} must be a number, not {value!r}")
        if name.startswith("fraction"):
            require(0 <= value <= 1, f"{name} must be in [0, 1], not {value}")
        else:
            require(value >= 0, f"{name} must not be negative, but is {value}")


def check_evaluation(
    privacy: Privacy | None, secure: SecureAggregation | None, fraction_evaluate: float
) -> None:
    """Refuse evaluation by clients in a private run; warn of it in a secure one.

    The metrics of an evaluation are exact, and the server sees those of each client.
    """
    require(
        privacy is None or fraction_evaluate == 0,
        "privacy does not cover the metrics of an evaluation by clients; set "
        "fraction_evaluate=0.0, and evaluate on the server by evaluate_fn",
    )
    if secure is not None and fraction_evaluate > 0:
        log(
            WARNING,
            "secure aggregation does not cover evaluation: each client's metrics reach the server "
            "in the clear, its number of examples too; set fraction_evaluate=0.0",
        )
