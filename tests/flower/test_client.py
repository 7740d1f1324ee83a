"""`LocalRule`: a user's own loop gives the rounds of the simulator, and mistakes are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

import fedexp as fx
from fedexp.data.federation import Batch
from fedexp.engine.plan import sample_cohort
from fedexp.flower import LocalRule, initial_arrays
from fedexp.flower.simulated_client import from_arrays
from fedexp.tasks import Task
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.rounds import Rounds
from tests.flower.helpers.user_app import LR, float64_task, user_app

ALGORITHMS = [fx.fedexp(), fx.fedprox_exp(mu=0.5), fx.scaffold(), fx.scaffold_exp()]
CLIP = 0.3


def clipping_loop(
    model: nn.Module, optimizer: Optimizer, local: LocalRule, batches: Iterator[Batch]
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        local.correct()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def bare_loop(
    model: nn.Module, optimizer: Optimizer, local: LocalRule, batches: Iterator[Batch]
) -> None:
    for batch in batches:
        model.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        local.correct()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(LR * param.grad)
        local.took_step(LR)


def decaying_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR, weight_decay=0.1)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("cohort", [None, 2])
def test_an_unchanged_loop_gives_the_rounds_of_the_simulator(
    algorithm: fx.Algorithm, cohort: int | None
) -> None:
    task = float64_task()
    rounds = Rounds(FakeGrid(user_app(task), 4), algorithm, initial_arrays(task))
    for record in fx.simulate(task, algorithm, rounds=4, cohort=cohort, engine="loop"):
        metrics = rounds.run(sample_cohort(0, record.round, 4, cohort).tolist())
        assert_same(rounds, task, record)
        assert metrics["server_lr"] == pytest.approx(record.server_lr, rel=1e-9)


def assert_same(rounds: Rounds, task: Task, record: fx.Record) -> None:
    params, buffers = from_arrays(task, rounds.server.model())
    torch.testing.assert_close(params, record.state.params, rtol=1e-10, atol=1e-10)
    averaged = record.state.buffers.averaged
    torch.testing.assert_close(buffers.averaged, averaged, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_clipping_and_weight_decay_in_the_order_of_the_paper(algorithm: fx.Algorithm) -> None:
    task = float64_task()
    task = replace(task, local=replace(task.local, clip_norm=CLIP, weight_decay=0.1))
    app = user_app(task, decaying_sgd, clipping_loop)
    rounds = Rounds(FakeGrid(app, 4), algorithm, initial_arrays(task))
    for record in fx.simulate(task, algorithm, rounds=3, engine="loop"):
        rounds.run(range(4))
        # torch divides by norm + 1e-6 when it clips
        params, _ = from_arrays(task, rounds.server.model())
        torch.testing.assert_close(params, record.state.params, rtol=2e-5, atol=2e-5)


def test_a_loop_without_an_optimiser() -> None:
    task = float64_task()
    apps = [user_app(task), user_app(task, loop=bare_loop, bare=True)]
    usual, bare = (Rounds(FakeGrid(app, 4), fx.scaffold(), initial_arrays(task)) for app in apps)
    for _ in range(3):
        usual.run(range(4))
        bare.run(range(4))
    ours, theirs = bare.server.state.params, usual.server.state.params
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
