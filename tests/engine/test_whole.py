"""Rounds as one program give the numbers of rounds in parts. Here without CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedexp as fx
from fedexp.engine.batched import Batched
from fedexp.engine.cuda_graph import Finished, Program
from fedexp.engine.plan import Work, sample_cohort
from fedexp.engine.simulation import run_round
from fedexp.errors import EngineWarning
from fedexp.tasks import Task
from fedexp.tasks.task import Weighting
from tests.engine.test_engines_agree import EXACT, double_batch_norm, unequal
from tests.engine.test_stacked import images
from tests.helpers.rules import ALGORITHMS, rule_id


class AtOnce(Batched):
    """Takes programs as they are where a GPU would replay a graph."""

    def __init__(self, *form: Any) -> None:
        super().__init__(*form)
        self.rounds = 0

    def _replays(self, state: object) -> bool:
        return True

    def _capture(self, program: Program, inputs: Any) -> Program:
        return program

    def whole_round(self, work: Work, state: fx.SimulationState) -> Finished | None:
        done = super().whole_round(work, state)
        self.rounds += done is not None
        return done


class LooksAtNumbers(fx.Average):
    """A rule that a graph cannot hold."""

    def step(self, *args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def three_rounds(
    engine: Batched, task: Task, algorithm: fx.Algorithm, weighting: Weighting = "uniform"
) -> list[fx.Record]:
    state, records = fx.SimulationState.initial(task, algorithm, 0), []
    for t in range(1, 4):
        clients = sample_cohort(0, t, task.train.clients, 3)
        work = Work(task, algorithm, task.local, weighting, 0, t, clients)
        records.append(run_round(work, state, engine))
        state = records[-1].state
    return records


def assert_same(one: fx.Record, other: fx.Record) -> None:
    torch.testing.assert_close(one.state.params, other.state.params, **EXACT)
    torch.testing.assert_close(one.state.output()[0], other.state.output()[0], **EXACT)
    assert one.metrics.keys() == other.metrics.keys()
    assert (one.clients, one.dropped) == (other.clients, other.dropped)
    assert one.server_lr == pytest.approx(other.server_lr, rel=1e-9)
    assert set(one.state.clients) == set(other.state.clients)
    for client, kept in one.state.clients.items():
        for name, value in kept.items():
            torch.testing.assert_close(value, other.state.clients[client][name], **EXACT)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_at_once_is_in_parts(algorithm: fx.Algorithm) -> None:
    layers, alike = images(), unequal(double_batch_norm, (7, 7, 7))
    for task, form in ((layers, ("layers",)), (alike, ("vmap", False))):
        engine = AtOnce(*form)
        pairs = zip(
            three_rounds(engine, task, algorithm, "size"),
            three_rounds(Batched(*form), task, algorithm, "size"),
            strict=True,
        )
        for one, other in pairs:
            assert_same(one, other)
        assert engine.rounds == 3


def test_a_round_without_any_client_changes_nothing() -> None:
    task = images()
    task = replace(task, local=replace(task.local, lr=1e300))
    first, *_ = three_rounds(AtOnce(), task, fx.fedexp())
    assert (first.clients, first.dropped, first.server_lr) == (0, 3, None)
    assert torch.equal(first.state.params, fx.SimulationState.initial(task, fx.fedexp(), 0).params)


def test_a_rule_that_cannot_be_captured_is_said_once_and_runs() -> None:
    class Second(LooksAtNumbers):
        def step(self, *args: Any) -> Any:
            if engine._in_parts:
                return fx.Average.step(self, *args)
            return super().step(*args)

    engine = AtOnce()
    with pytest.warns(EngineWarning, match="not captured") as told:
        records = three_rounds(engine, images(), fx.Algorithm(server=Second()))
    assert len(told) == 1
    assert engine.rounds == 0
    assert records[-1].clients == 3
