"""The server side of an algorithm: steps, outputs, and states that must stay finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedexp import Aggregate, Algorithm, ServerRule, fedavg, fedexp, scaffold_exp
from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, UsageError
from fedexp.flower import Server
from fedexp.objective import Buffers


def arrays(*values: float) -> ArrayRecord:
    return ArrayRecord({"w": torch.tensor(values, dtype=torch.float32)})


def test_a_step_is_the_rules_step() -> None:
    server = Server(fedexp(eps=0.0), arrays(0, 0, 0, 0))
    metrics = server.step(Aggregate.of(torch.eye(4) * 4), total_weight=4)
    assert metrics["server_lr"] == 2.0
    assert metrics["diversity"] == 4.0
    assert metrics["clients"] == 4
    assert server.model()["w"].numpy().tolist() == [-2.0] * 4
    assert server.state.round == server.state.steps == 1


def test_output_is_the_mean_of_two_iterates_and_training_continues_from_the_last() -> None:
    server = Server(fedexp(eps=np.inf), arrays(0, 0))
    server.step(Aggregate.of([[1.0, 1.0]]), 1)
    assert server.output()["w"].numpy().tolist() == [-1, -1]  # not with the untrained model
    server.step(Aggregate.of([[1.0, 1.0]]), 1)
    assert server.output()["w"].numpy().tolist() == [-1.5, -1.5]
    assert server.model()["w"].numpy().tolist() == [-2, -2]


def test_a_round_without_clients_changes_nothing_but_its_number() -> None:
    server = Server(fedavg(), arrays(1, 2))
    before = server.state
    assert server.step(Aggregate.zero(2), 3) == {"clients": 0, "dropped": 0}
    assert server.state.round == 1
    assert server.state.steps == 0
    assert server.state.params is before.params


def test_every_rule_reports_the_norms() -> None:
    metrics = Server(fedavg(), arrays(0, 0)).step(Aggregate.of([[3.0, 4.0], [1.0, 0.0]]), 2)
    assert metrics["mean_sq_norm"] == 13.0
    assert metrics["sq_norm_of_mean"] == pytest.approx(8.0)
    assert metrics["diversity"] == pytest.approx(13 / 8)


def test_broadcast_state_is_sent_for_scaffold_only() -> None:
    assert Server(fedexp(), arrays(1, 2)).broadcast() is None
    server = Server(scaffold_exp(), arrays(1, 2))
    psi = {"control": torch.tensor([[1.0, 2.0]])}
    server.step(Aggregate.of([[0.0, 1.0]], extras=psi), total_weight=4)
    broadcast = server.broadcast()
    assert broadcast is not None
    assert broadcast["control"].numpy().tolist() == [-0.25, -0.5]


def test_a_step_that_diverges_leaves_the_state_before_it() -> None:
    server = Server(fedavg(lr=1e10), arrays(0, 0))
    with pytest.raises(DivergedError, match="round 1"):
        server.step(Aggregate.of([[1.0, 1.0]]), 1)
    assert server.state.round == 0


def test_a_model_that_overflows_half_precision_has_diverged() -> None:
    server = Server(fedavg(), ArrayRecord({"w": torch.zeros(2, dtype=torch.float16)}))
    with pytest.raises(DivergedError, match="type of its arrays"):
        server.step(Aggregate.of([[1e6, 1.0]]), 1)


def test_a_first_model_with_nan_is_refused() -> None:
    with pytest.raises(UsageError, match=r"not finite \('w'\).*persistent=False"):
        Server(fedavg(), arrays(1.0, float("nan")))


def test_a_rule_that_breaks_its_contract_is_refused_before_the_first_round() -> None:
    class Plain(ServerRule):
        def step(self, params: Any, aggregate: Any, state: Any) -> Any:
            return params - aggregate.mean

    with pytest.raises(UsageError, match="step of Plain returns Tensor; return the next param"):
        Server(Algorithm("plain", server=Plain()), arrays(0, 0))


def test_updates_are_taken_from_what_was_sent() -> None:
    """In half precision the server's own iterate is another point than the one clients had."""
    start = ArrayRecord({"w": torch.zeros(1, dtype=torch.float16)})
    server = Server(fedavg(), start)
    server.state = SimulationState.of(torch.tensor([1 / 3]), Buffers.none(), Algorithm())
    sent = {"w": server.model()["w"].numpy()}
    delta, extras = server.contribution(sent, server.start_point())
    assert delta.tolist() == [0.0]
    assert not extras
