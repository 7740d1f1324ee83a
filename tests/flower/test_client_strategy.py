"""Clients and strategies together: the simulator's rounds, whatever happens to nodes and server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fedexp as fx
from fedexp.flower import RuleStrategy, identify, initial_arrays, planned
from fedexp.flower.simulated_client import from_arrays
from fedexp.runs import load_run
from tests.flower.fake_grid import FakeGrid, only, replies
from tests.flower.rounds import Rounds
from tests.flower.user_app import float64_task, user_app
from tests.helpers.problems import least_squares

TASK = least_squares(clients=4, dim=8)
CLOSE = 1e-10


def planned_app() -> ClientApp:
    app = ClientApp()
    identify(app)
    app.train()(planned(TASK))
    return app


def strategy(algorithm: fx.Algorithm, **options: Any) -> RuleStrategy:
    options = {"fraction_evaluate": 0.0, "weighting": "uniform", "identify": True, **options}
    return RuleStrategy(algorithm=algorithm, **options)


def control(made: RuleStrategy) -> Tensor:
    assert made.training is not None
    return made.training.server.state.broadcast["control"]


@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(), fx.fedprox_exp(mu=0.5), fx.scaffold_exp()], ids=lambda a: a.name
)
def test_a_users_loop_on_half_of_the_nodes_is_the_simulator(algorithm: fx.Algorithm) -> None:
    task = float64_task()
    made = strategy(algorithm, fraction_train=0.5)
    result = made.start(FakeGrid(user_app(task), 4), initial_arrays(task), num_rounds=4)
    records = list(fx.simulate(task, algorithm, rounds=4, cohort=2, engine="loop"))
    steps = [result.train_metrics_clientapp[r.round]["server_lr"] for r in records]
    assert steps == pytest.approx([r.server_lr for r in records], rel=1e-9)
    assert result.arrays is not None
    params, buffers = from_arrays(task, result.arrays)
    expected, others = records[-1].state.output()
    torch.testing.assert_close(params, expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(buffers.averaged, others.averaged, rtol=CLOSE, atol=CLOSE)


class ServerDiesError(Exception):
    """The SuperLink was killed."""


def test_server_and_nodes_die_and_scaffold_goes_on(tmp_path: Path) -> None:
    def dies(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if round == 3:
            raise ServerDiesError
        return None

    folder, arrays = tmp_path / "run", initial_arrays(TASK)
    options: dict[str, Any] = {"fraction_train": 0.5, "checkpoint": folder}
    before, after = strategy(fx.scaffold_exp(), **options), strategy(fx.scaffold_exp(), **options)
    with pytest.raises(ServerDiesError):
        before.start(FakeGrid(planned_app(), 4), arrays, num_rounds=6, evaluate_fn=dies)
    result = after.start(FakeGrid(planned_app(), 4, seed=9), arrays, num_rounds=6)
    *_, last = fx.simulate(TASK, fx.scaffold_exp(), rounds=6, cohort=2, engine="loop")
    assert result.arrays is not None
    params, _ = from_arrays(TASK, result.arrays)
    torch.testing.assert_close(params, last.state.output()[0], rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(
        control(after), last.state.broadcast["control"], rtol=CLOSE, atol=CLOSE
    )


def spoil(content: RecordDict) -> None:
    content["arrays"] = ArrayRecord({"params": Array(np.full(8, np.nan))})


def test_a_client_whose_reply_was_dropped_stays_with_the_server() -> None:
    made, arrays = strategy(fx.scaffold()), initial_arrays(TASK)
    faulty = {1: only(replies(spoil), rounds=[2])}
    made.start(FakeGrid(planned_app(), 4, faults=faulty), arrays, num_rounds=4)
    twin = Rounds(FakeGrid(planned_app(), 4), fx.scaffold(), arrays)
    for cohort in ([0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]):
        twin.run(cohort)
    expected = twin.server.state.broadcast["control"]
    torch.testing.assert_close(control(made), expected, rtol=CLOSE, atol=CLOSE)


class Skips(RuleStrategy):
    """A subclass that leaves the second round out."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        if server_round == 2:
            list(replies)
            return None, None
        return super().aggregate_train(server_round, replies)


def test_a_round_that_a_subclass_left_out_accepts_nobody(tmp_path: Path) -> None:
    """Its row repeated the names of the round before, so clients resumed from states never used."""
    made = Skips(algorithm=fx.scaffold(), fraction_evaluate=0.0, checkpoint=tmp_path / "run")
    made.start(FakeGrid(planned_app(), 4), initial_arrays(TASK), num_rounds=3)
    assert [len(row.get("accepted", ())) for row in load_run(tmp_path / "run").rows] == [4, 0, 4]
