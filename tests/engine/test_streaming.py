"""Streamed examples, and pages that are read ahead, change no number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.data import streaming as streamed_data
from fedexp.data.streaming import StreamedFederation, on_device
from fedexp.distributed import DistributedGroup, Ranks
from fedexp.distributed.sharding import shard_cohort
from fedexp.engine import read_ahead, simulation
from fedexp.engine.batched import Batched
from fedexp.engine.client_store import StoredStates
from fedexp.engine.plan import Work, sample_cohort
from fedexp.engine.select import Selected
from fedexp.engine.state import SimulationState
from fedexp.tasks import Task
from tests.engine.helpers import needs_cuda
from tests.helpers.problems import BatchNormNet, classes_task

SIZES = (10, 6, 14, 7, 8, 11)


def streamed(task: Task, device: str = "cpu") -> Task:
    train = StreamedFederation(task.train.fields, task.train.offsets, torch.device(device))
    return replace(task, train=train)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("epochs", [None, 2])
def test_streamed_examples_train_the_same_model(engine: str, epochs: int | None) -> None:
    task = classes_task(BatchNormNet, SIZES)
    local = replace(task.local, steps=None if epochs else 5, epochs=epochs)
    runs = [
        list(fx.simulate(each, fx.scaffold_exp(), 5, 3, local=local, engine=engine))  # type: ignore[arg-type]
        for each in (task, streamed(task))
    ]
    for a, b in zip(*runs, strict=True):
        assert replace(a, seconds=0.0) == replace(b, seconds=0.0)
    assert torch.equal(runs[0][-1].state.params, runs[1][-1].state.params)


def test_the_batched_engine_reads_streamed_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of clients that are not in the cohort could be anything."""
    task = streamed(classes_task(BatchNormNet, SIZES))
    asked: list[list[int]] = []
    cohort_rows = StreamedFederation.cohort_rows

    def noted(self: StreamedFederation, who: list[int]) -> Any:
        asked.append(who)
        return cohort_rows(self, who)

    monkeypatch.setattr(StreamedFederation, "cohort_rows", noted)
    monkeypatch.setattr(simulation, "select_engine", lambda *_: Selected(Batched(), ""))
    for _ in fx.simulate(task, fx.fedexp(), 4, 3):
        pass
    assert asked == [sample_cohort(0, r, 6, 3).tolist() for r in (1, 2, 3, 4)]


class AtOnce:
    """An executor that runs a task when it is submitted."""

    def __init__(self, threads: int) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> None:
        function(*arguments)


def test_the_next_cohort_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 0)
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(read_ahead, "prefetch_pages", lambda train, who: asked.append(who.tolist()))
    states: list[list[int]] = []
    monkeypatch.setattr(StoredStates, "prefetch", lambda self, who: states.append(who.tolist()))
    task = classes_task(lambda: nn.Linear(4, 3), SIZES)
    for _ in fx.simulate(task, fx.scaffold(), 4, 3, client_store="disk"):
        pass
    cohorts = [sample_cohort(0, r, 6, 3).tolist() for r in (1, 2, 3, 4, 5)]
    assert states == cohorts
    assert asked == cohorts


def test_a_rank_reads_ahead_for_its_own_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 0)
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(read_ahead, "prefetch_pages", lambda train, who: asked.append(who.tolist()))
    task = classes_task(lambda: nn.Linear(4, 3), SIZES)
    first = Work(task, fx.fedexp(), task.local, "uniform", 0, 1, sample_cohort(0, 1, 6, 5))
    among = Ranks(1, 2, 1, torch.device("cpu"), store=None, gloo_group=None)
    ahead = read_ahead.ReadAhead(task.train, DistributedGroup(among).shard)
    ahead(first, SimulationState.initial(task, fx.fedexp(), 0))
    assert asked == [shard_cohort(work, 2)[1].tolist() for work in (first, first.after())]


@needs_cuda
@pytest.mark.parametrize("make", [fx.fedexp, fx.scaffold_exp], ids=lambda make: make.__name__)
def test_a_federation_larger_than_a_gpu(make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Rows are copied from the host, and client states read from a file."""
    task = classes_task(BatchNormNet, SIZES)
    whole = list(fx.simulate(task, make(), 5, 3, device="cuda"))
    monkeypatch.setattr(streamed_data, "free_bytes", lambda device: 0)
    assert isinstance(on_device(task.train, torch.device("cuda")), StreamedFederation)
    parts = list(fx.simulate(task, make(), 5, 3, device="cuda", client_store="disk"))
    torch.testing.assert_close(parts[-1].state.params, whole[-1].state.params)
    assert np.isclose(parts[-1].train_loss, whole[-1].train_loss)  # type: ignore[arg-type]
