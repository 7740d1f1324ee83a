"""A whole round as one program: the same numbers, and what cannot be captured runs without.

Here programs are called as they are where a GPU would replay a graph; `test_cuda.py` replays them.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.client import Tensors
from fedexp.engine import cuda_graph
from fedexp.engine.batched import Batched, Implementation
from fedexp.engine.cuda_graph import Program, RepeatedProgram
from fedexp.engine.local_steps import LocalRun, SteppedProgram
from fedexp.engine.loop import Loop
from fedexp.engine.plan import sample_cohort
from fedexp.engine.simulation import run_round
from fedexp.errors import EngineWarning
from fedexp.tasks import Task
from tests.engine.helpers import (
    assert_same_state,
    double_batch_norm,
    images,
    run_rounds,
    unequal,
    work_of,
)
from tests.helpers.rules import ALGORITHMS, rule_id


def as_it_is(program: Program, inputs: Any, warm_up: Program | None) -> Program:
    return program


def captured(implementation: Implementation = "vmap", padded: bool = True) -> Batched:
    """Return an engine that takes programs as they are instead of capturing them."""
    return Batched(implementation, padded, graphs=True, capture=as_it_is)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_a_whole_round_is_local_training_and_server_step(algorithm: fx.Algorithm) -> None:
    layers, alike = images(), unequal(double_batch_norm, (7, 7, 7))
    cases: list[tuple[Task, Implementation, bool]] = [
        (layers, "layers", True),
        (alike, "vmap", False),
    ]
    for task, implementation, padded in cases:
        engine = captured(implementation, padded)
        pairs = zip(
            run_rounds(engine, task, algorithm, weighting="size"),
            run_rounds(Batched(implementation, padded), task, algorithm, weighting="size"),
            strict=True,
        )
        for one, other in pairs:
            assert_same_state(one.state, other.state)
            assert one.metrics.keys() == other.metrics.keys()
            assert (one.clients, one.dropped) == (other.clients, other.dropped)
            assert one.server_lr == pytest.approx(other.server_lr, rel=1e-9)
        graph = "local training" if algorithm.client.needs_loss else "round"
        assert engine.cuda_graph == graph


class CountsSteps(nn.Module):
    """A model with a buffer that counts its steps."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        out: Tensor = self.layer(x)
        return out


def test_a_whole_round_weighs_buffers_of_unequal_work_by_p() -> None:
    task = unequal(CountsSteps, (8, 16, 48))
    task = replace(task, local=fx.LocalTraining(lr=0.1, epochs=1, batch_size=8))
    engine = captured()
    (record, *_) = run_rounds(engine, task, fx.fednova(), weighting="size")
    assert engine.cuda_graph == "round"
    expected = (8 * 1 + 16 * 2 + 48 * 6) / 72
    assert record.state.buffers.averaged.item() == pytest.approx(expected, rel=1e-12)


def test_a_round_without_any_client_changes_nothing() -> None:
    task = images()
    task = replace(task, local=replace(task.local, lr=1e300))
    engine = captured()
    first, *_ = run_rounds(engine, task, fx.fedexp())
    assert engine.cuda_graph == "round"
    assert (first.clients, first.dropped, first.server_lr) == (0, 3, None)
    assert torch.equal(first.state.params, fx.SimulationState.initial(task, fx.fedexp(), 0).params)


def test_unequal_batches_that_are_not_padded_are_not_captured() -> None:
    engine = captured("vmap", False)
    run_rounds(engine, unequal(double_batch_norm, (4, 10, 30, 2)), fx.fedexp())
    assert engine.cuda_graph is None


class Counting:
    """Takes programs as they are; counts them, and the steps that each call takes."""

    def __init__(self) -> None:
        self.programs = 0
        self.steps: list[int] = []

    def __call__(self, program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        self.programs += 1

        def replay(inputs: Tensors) -> Tensors:
            assert isinstance(program, SteppedProgram)
            taken = 0
            run = program.begin(inputs)
            for _ in range(int(inputs["steps"]) - 1):
                program.step(run)
                taken += 1
            self.steps.append(taken + 1)
            return program.finish(run)

        return replay


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_one_program_of_a_step_serves_cohorts_of_all_numbers_of_steps(
    algorithm: fx.Algorithm,
) -> None:
    """Each round takes the steps of its largest client, and no more."""
    task = unequal(sizes=(3, 40, 17, 8, 1, 25))
    task = replace(task, local=fx.LocalTraining(lr=0.1, epochs=1, batch_size=4, clip_norm=0.5))
    capture = Counting()
    engine = Batched("layers", graphs=True, capture=capture)
    rounds = run_rounds(engine, task, algorithm)
    for one, other in zip(rounds, run_rounds(Loop(), task, algorithm), strict=True):
        assert_same_state(one.state, other.state)
    assert capture.programs == 1
    sizes = task.train.sizes
    cohorts = [sample_cohort(0, t, len(sizes), 3) for t in range(1, len(rounds) + 1)]
    expected = [-(-int(sizes[cohort].max()) // 4) for cohort in cohorts]
    assert capture.steps == expected
    assert len(set(expected)) > 1


def test_a_large_model_is_captured_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With augmentation, whose draws change from step to step."""
    monkeypatch.setattr("fedexp.engine.batched.STEPPED_MODEL", 1)
    capture, task = Counting(), images()
    engine = Batched("layers", graphs=True, capture=capture)
    rounds = run_rounds(engine, task, fx.fedexp())
    for one, other in zip(rounds, run_rounds(Loop(), task, fx.fedexp()), strict=True):
        assert_same_state(one.state, other.state)
    assert capture.steps == [task.local.steps] * len(rounds)


def test_both_kinds_of_steps_are_taken_before_they_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a cohort whose clients take one step: a kernel must not be compiled in a capture."""
    task = unequal(sizes=(3, 2, 4, 40))
    task = replace(task, local=fx.LocalTraining(lr=0.1, epochs=1, batch_size=4))
    work = replace(work_of(task, fx.fedexp()), cohort=np.arange(3))
    state = fx.SimulationState.initial(task, fx.fedexp(), 0)
    taken: list[bool] = []
    step = LocalRun.step

    def counted(run: LocalRun, s: int | Tensor, is_last: bool) -> None:
        taken.append(is_last)
        step(run, s, is_last)

    def capture(program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        assert warm_up is not None
        warm_up(inputs)
        assert taken == [False, True]
        return program

    monkeypatch.setattr(LocalRun, "step", counted)
    result = Batched("layers", graphs=True, capture=capture).run_round(work, state)
    assert result is not None
    assert taken == [False, True, True]
    monkeypatch.undo()
    assert_same_state(result.state, run_round(work, state, Loop()).state)


def test_a_large_model_of_one_step_is_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedexp.engine.batched.STEPPED_MODEL", 1)
    task = images()
    task = replace(task, local=replace(task.local, steps=1))
    seen: list[bool] = []

    def capture(program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        seen.append("steps" in inputs)
        return program

    run_rounds(Batched("layers", graphs=True, capture=capture), task, fx.fedexp())
    assert seen == [False]


class Refusing:
    """Captures nothing, or local training alone."""

    def __init__(self, rounds_only: bool) -> None:
        self.rounds_only, self.calls = rounds_only, 0

    def __call__(self, program: Program, inputs: Any, warm_up: Program | None) -> Program:
        self.calls += 1
        if self.calls == 1 or not self.rounds_only:
            raise RuntimeError("operation not permitted when stream is capturing")
        return program


@pytest.mark.parametrize(
    ("rounds_only", "graph", "warnings"),
    [(True, "local training", ["rounds are"]), (False, None, ["rounds are", "local training is"])],
)
def test_what_cannot_be_captured_is_warned_about_once_and_runs(
    rounds_only: bool, graph: str | None, warnings: list[str]
) -> None:
    capture = Refusing(rounds_only)
    engine = Batched(graphs=True, capture=capture)
    with pytest.warns(EngineWarning, match="not captured") as caught:
        records = run_rounds(engine, images(), fx.fedexp())
    assert [str(each.message).split(" not captured")[0] for each in caught] == warnings
    assert capture.calls == 2
    assert engine.cuda_graph == graph
    plain = run_rounds(Batched(), images(), fx.fedexp())
    assert_same_state(records[-1].state, plain[-1].state)


def copied(program: Program, inputs: Tensors) -> Program:
    """Return a program with inputs of its own, as a CUDA graph has them."""
    own = {name: value.clone() for name, value in inputs.items()}

    def replay(inputs: Tensors) -> Tensors:
        for name, value in inputs.items():
            own[name].copy_(value)
        return program(own)

    return replay


def test_an_evaluation_is_captured_once_and_follows_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graph, "no_synchronization", nullcontext)
    captured: list[Program] = []

    def capture(program: Program, inputs: Tensors) -> Program:
        captured.append(copied(program, inputs))
        return captured[-1]

    task, run = images(), RepeatedProgram(capture)
    for seed in range(3):
        state = fx.SimulationState.initial(task, fx.fedavg(), seed)
        assert task.evaluate(*state.output(), run) == task.evaluate(*state.output())
    assert len(captured) == 1


def test_a_first_evaluation_draws_what_a_replay_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "no_synchronization", nullcontext)

    def program(inputs: Tensors) -> Tensors:
        return {"draw": torch.rand(3)}

    run, found = RepeatedProgram(copied), []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(run(program, {})["draw"])
    assert torch.equal(*found)


def test_a_captured_graph_holds_what_its_program_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the weights of the examples, which belong to the task."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    task = images()
    state, held = fx.SimulationState.initial(task, fx.fedavg(), 0), weakref.ref(task)
    graphs: list[Program] = []

    def run(program: Program, inputs: Tensors) -> Tensors:
        graph = cuda_graph.CapturedGraph(program, inputs)
        graphs.append(graph)
        return graph.outputs

    task.evaluate(*state.output(), run)
    del task
    gc.collect()
    assert held() is not None
    graphs.clear()
    gc.collect()
    assert held() is None


def test_an_evaluation_that_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "no_synchronization", nullcontext)
    calls: list[None] = []

    def refuse(program: Program, inputs: Tensors) -> Program:
        calls.append(None)
        raise RuntimeError("operation not permitted when stream is capturing")

    task, run = images(), RepeatedProgram(refuse)
    for seed in range(2):
        state = fx.SimulationState.initial(task, fx.fedavg(), seed)
        assert task.evaluate(*state.output(), run) == task.evaluate(*state.output())
    assert len(calls) == 1
