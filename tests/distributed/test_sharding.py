"""Shards of a cohort: each client is in one, and their costs are balanced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedexp as fx
from fedexp.distributed.sharding import (
    CohortShard,
    balanced_parts,
    empty_aggregate,
    shard_cohort,
)
from fedexp.engine import loop
from fedexp.engine.plan import Work, sample_cohort
from fedexp.engine.state import SimulationState
from fedexp.tasks import Task
from tests.helpers.problems import BatchNormNet, classes_task, least_squares

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=30)


def work_of(task: Task, algorithm: fx.Algorithm, round: int = 1, cohort: int = 5) -> Work:
    clients = sample_cohort(3, round, task.train.clients, cohort)
    return Work(task, algorithm, task.local, "uniform", 3, round, clients)


@given(COSTS, st.integers(1, 9), st.booleans())
def test_each_item_is_in_one_part(costs: list[int], parts: int, even: bool) -> None:
    found = balanced_parts(np.array(costs), parts, even)
    assert len(found) == parts
    assert sorted(np.concatenate(found).tolist()) == list(range(len(costs)))
    assert all((np.diff(part) > 0).all() for part in found)
    if even:
        counts = [len(part) for part in found]
        assert max(counts) - min(counts) <= 1


@given(COSTS, st.integers(1, 9))
def test_no_part_exceeds_the_mean_by_more_than_one_item(costs: list[int], parts: int) -> None:
    loads = [sum(costs[index] for index in part) for part in balanced_parts(np.array(costs), parts)]
    assert max(loads) <= sum(costs) / parts + max(costs)


def test_large_clients_go_to_different_parts() -> None:
    parts = balanced_parts(np.array([100, 1, 1, 100, 1, 1]), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 4], [2, 3, 5]]


def test_a_shard_knows_its_clients_of_the_next_round() -> None:
    task = classes_task(sizes=(10, 6, 14, 7, 30, 3, 22))
    first, second = (work_of(task, fx.fedexp(), round) for round in (1, 2))
    for rank in range(3):
        after = CohortShard.of(first, rank, 3).after()
        assert after.cohort.tolist() == shard_cohort(second, 3)[rank].tolist()
        assert (after.round, after.after().round) == (2, 3)


@pytest.mark.parametrize(
    "algorithm", [fx.fedexp(), fx.scaffold_exp(), fx.fednova()], ids=lambda a: a.name
)
@pytest.mark.parametrize("task", [classes_task(BatchNormNet), least_squares()], ids=["bn", "ls"])
def test_an_empty_aggregate_has_the_layout_of_a_full_one(
    task: Task, algorithm: fx.Algorithm
) -> None:
    work = work_of(task, algorithm, cohort=2)
    state = SimulationState.initial(task, algorithm, 0)
    some, _ = loop.Loop()(work, state)
    empty = empty_aggregate(replace(work, cohort=work.cohort[:0]), state)
    assert empty.extras.keys() == some.extras.keys()
    assert torch.equal((some + empty).pack(), some.pack())
    assert empty.update.dtype == some.update.dtype
    assert not empty.pack().any()
