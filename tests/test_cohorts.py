"""Cohorts by number, fraction, list and function, in all engines, and the ready-made functions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fedexp as fx
from fedexp.cohorts import Choose
from fedexp.data import Federation
from fedexp.distributed.sharding import CohortShard, shard_cohort
from fedexp.engine.batched import Batched
from fedexp.engine.plan import CohortRule, Work, sample_cohort
from fedexp.engine.simulation import run_round
from tests.engine.helpers import assert_agree, assert_same_state, unequal
from tests.helpers.problems import classes_task, least_squares

RNG = np.random.default_rng(0)


def varying(rng: np.random.Generator, round: int, federation: Federation) -> NDArray[np.int64]:
    """Return one to four clients, in any order; there is no fifth round."""
    assert 1 <= round <= 4
    return rng.permutation(federation.clients)[: (3, 1, 4, 2)[round - 1]]


def clients_of(cohort: Any, rounds: int = 4, **options: Any) -> list[int]:
    task = unequal()
    return [r.clients for r in fx.simulate(task, fx.fedavg(), rounds, cohort, **options)]


def test_none_is_the_tasks_own_and_all_is_all() -> None:
    task = replace(classes_task(), cohort=2)
    (own,), (every,) = (fx.simulate(task, fx.fedavg(), 1, cohort) for cohort in (None, "all"))
    assert (own.clients, every.clients) == (2, 4)
    (record,) = fx.simulate(classes_task(), fx.fedavg(), 1)
    assert record.clients == 4  # a task that names no cohort trains all clients


def test_numbers_and_fractions() -> None:
    assert clients_of(np.int64(3)) == clients_of(3) == clients_of(0.5) == [3] * 4
    assert clients_of(np.float32(0.5)) == [3] * 4
    assert clients_of(0.01) == [1] * 4  # at least one
    assert clients_of(1.0) == [6] * 4
    one, other = (
        next(fx.simulate(unequal(), fx.fedexp(), 1, cohort)).state.params for cohort in (3, 0.5)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("cohort", [[4, 1], (1, 4), np.array([4, 1]), lambda *_: {4: 0, 1: 0}])
def test_a_list_of_clients_is_the_cohort_of_every_round(cohort: Any) -> None:
    if callable(cohort):
        chosen = cohort
        cohort = lambda *each: list(chosen(*each))  # noqa: E731
    *_, last = fx.simulate(unequal(), fx.scaffold(), 3, cohort, engine="loop")
    assert sorted(last.state.clients) == [1, 4]


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        (7, "larger than the federation of 6 clients; take 6 at most"),
        (0, "at least 1"),
        (1.5, r"a fraction in \(0, 1\]"),
        (0.0, r"a fraction in \(0, 1\]"),
        ([], "is empty"),
        ([1, 1], "has client 1 twice"),
        ([0, 6], "has client 6; clients are numbered from 0 to 5"),
        ([-1], "has client -1"),
        ([0.5], "list of client numbers"),
        ("some", "cohort 'some' is not a number, a"),
        (True, "a number, a fraction"),
        (lambda rng, round, federation: [], "the cohort of round 1 is empty"),
        (lambda rng, round, federation: [9], "the cohort of round 1 has client 9"),
        (lambda rng, round, federation: None, "the cohort of round 1 must be a list"),
        (lambda rng: [0], r"not a function of \(rng, round, federation\); take these arguments"),
        (fx.cohorts.cyclic, r"cyclic is not a function of .*call it if it returns such a function"),
    ],
)
def test_what_is_no_cohort_is_refused_at_the_call(cohort: Any, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        fx.simulate(unequal(), fx.fedavg(), 2, cohort)


def test_a_function_sees_the_seed_and_the_round_alone() -> None:
    drawn: dict[tuple[int, int], set[float]] = {}

    def choose(rng: np.random.Generator, round: int, federation: Federation) -> list[int]:
        drawn.setdefault((len(drawn) // 100, round), set()).add(rng.random())
        return [0, 2]

    whole = list(fx.simulate(unequal(), fx.scaffold(), 4, choose))
    list(fx.simulate(unequal(), fx.scaffold(), 4, choose, start=whole[1].state))
    assert all(len(values) == 1 for values in drawn.values())
    assert len(set.union(*drawn.values())) == 4
    list(fx.simulate(unequal(), fx.scaffold(), 4, choose, seed=1))
    assert len(set.union(*drawn.values())) == 8


@pytest.mark.parametrize("engine", ["batched", "threads"])
@pytest.mark.parametrize("algorithm", [fx.fedexp(), fx.scaffold_exp()], ids=lambda a: a.name)
def test_engines_agree_on_cohorts_of_varying_size(engine: str, algorithm: fx.Algorithm) -> None:
    assert clients_of(varying) == [3, 1, 4, 2]
    assert_agree(unequal(), algorithm, engine, cohort=varying)
    assert_agree(unequal(), algorithm, engine, cohort=[0, 3, 5])


def test_closed_forms_agree_on_cohorts_of_varying_size() -> None:
    assert_agree(least_squares(clients=6), fx.scaffold_exp(), "quadratic", cohort=varying)
    dense = fx.tasks.digits(clients=6)
    *_, one = fx.simulate(dense, fx.fedexp(), 4, varying, engine="dense")
    *_, other = fx.simulate(dense, fx.fedexp(), 4, varying, engine="loop")
    torch.testing.assert_close(one.state.params, other.state.params, rtol=1e-3, atol=1e-4)


def test_client_states_on_disk_have_room_for_every_chosen_client() -> None:
    runs = [
        list(fx.simulate(unequal(), fx.scaffold(), 4, varying, client_store=where))
        for where in ("memory", "disk")
    ]
    for one, other in zip(*runs, strict=True):
        assert_same_state(one.state, other.state)
    assert CohortRule.of(varying, 6).most(6, 4) == 6
    assert CohortRule.of([1, 2], 6).most(6, 4) == 2
    assert CohortRule.of(2, 60).most(60, 4) == 8


def test_a_resumed_run_has_the_same_cohorts() -> None:
    whole = list(fx.simulate(unequal(), fx.scaffold(), 4, varying))
    rest = list(fx.simulate(unequal(), fx.scaffold(), 4, varying, start=whole[1].state))
    assert torch.equal(whole[-1].state.params, rest[-1].state.params)


def test_the_next_round_is_that_of_the_rule() -> None:
    task = unequal()
    rule, local = CohortRule(choose=varying), task.local
    cohorts = [rule.sample(0, round, task.train).tolist() for round in (1, 2, 3, 4)]
    work = Work(task, fx.fedavg(), local, "uniform", 0, 1, np.array(cohorts[0]), rule, 4)
    found = [work.cohort.tolist()]
    while len(work.cohort):
        work = work.after()
        found.append(work.cohort.tolist())
    assert found == [*cohorts, []]  # a function is not asked for a round after the last
    drawn = Work(task, fx.fedavg(), local, "uniform", 0, 1, np.arange(3), rounds=1).after()
    assert drawn.cohort.tolist() == sample_cohort(0, 2, 6, 3).tolist()


def test_shards_follow_the_rule() -> None:
    task, rule = unequal(), CohortRule(choose=varying)
    first = Work(task, fx.fedavg(), task.local, "uniform", 0, 2, np.array([1]), rule, 4)
    for rank in range(2):
        shard: Work = CohortShard.of(first, rank, 2)
        for round in (3, 4):
            shard = shard.after()
            whole = replace(first, round=round, cohort=rule.sample(0, round, task.train))
            assert shard.cohort.tolist() == shard_cohort(whole, 2)[rank].tolist()
        assert not len(shard.after().cohort)


def test_graphs_are_captured_for_some_sizes_of_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []

    def capture(program: Any, inputs: Any, warm_up: Any) -> Any:
        captured.append(program)
        return program

    monkeypatch.setattr("fedexp.engine.batched.MOST_GRAPHS", 2)
    task, algorithm, rule = unequal(), fx.scaffold_exp(), CohortRule(choose=varying)
    engines = (Batched(graphs=False), Batched(graphs=True, capture=capture))
    states = [fx.SimulationState.initial(task, algorithm, 0)] * 2
    for round in (1, 2, 3, 4):
        cohort = rule.sample(0, round, task.train)
        work = Work(task, algorithm, task.local, "uniform", 0, round, cohort, rule, 4)
        states = [run_round(work, s, e).state for s, e in zip(states, engines, strict=True)]
        assert_same_state(*states)
        assert engines[1].cuda_graph == ("round" if round <= 2 else None)
    assert len(captured) == 2


def shares_of(choose: Choose, sizes: NDArray[np.int64], rounds: int) -> NDArray[np.float64]:
    """Return in which share of the rounds a client takes part."""
    offsets = np.cumsum([0, *sizes])
    federation = Federation({"x": torch.zeros(offsets[-1])}, offsets)
    rule = CohortRule(choose=choose)
    cohorts = [rule.sample(0, round, federation) for round in range(1, rounds + 1)]
    return np.bincount(np.concatenate(cohorts), minlength=len(sizes)) / rounds


def assert_shares(shares: NDArray[Any], expected: NDArray[Any], rounds: int) -> None:
    """Assert that each share is within five standard deviations."""
    errors = np.abs(shares - expected)
    assert (errors <= 5 * np.sqrt(expected * (1 - expected) / rounds)).all(), shares / expected


@pytest.mark.parametrize("cohort", [1, 2, 10])
def test_clients_are_drawn_in_proportion_to_their_examples(cohort: int) -> None:
    sizes, rounds = 3 * np.arange(1, 21), 2000
    shares = shares_of(fx.cohorts.weighted_by_size(cohort), sizes, rounds)
    assert_shares(shares, cohort * sizes / sizes.sum(), rounds)


def test_clients_too_large_for_their_proportion_always_take_part() -> None:
    sizes = np.array([2, 100, 4, 30, 6, 8])  # with 100 gone, 30 of 50 is too much for 2 of them
    shares = shares_of(fx.cohorts.weighted_by_size(3), sizes, 2000)
    assert_shares(shares, np.array([0.1, 1, 0.2, 1, 0.3, 0.4]), 2000)
    assert shares_of(fx.cohorts.weighted_by_size(6), sizes, 3).tolist() == [1] * 6


def test_who_takes_part_where_nobody_is_available() -> None:
    for probability in (0.1, 0.0, [0.1, 0.1 - 1e-9, 0.1, 0.1]):
        shares = shares_of(fx.cohorts.available(probability, size=1), np.ones(4, int), 2000)
        assert_shares(shares, np.full(4, 0.25), 2000)


def test_ready_made_functions() -> None:
    task = unequal()
    heavy = fx.cohorts.weighted_by_size(2)
    counts = np.zeros(6)
    for round in range(1, 400):
        counts[CohortRule(choose=heavy).sample(0, round, task.train)] += 1
    assert counts[1] > counts[2] > counts[0] > counts[4]  # 40, 17, 3 and 1 examples
    assert clients_of(heavy, 2) == [2, 2]
    turns = CohortRule(choose=fx.cohorts.cyclic(4))
    found = [turns.sample(0, round, task.train).tolist() for round in (1, 2, 3)]
    assert found == [[0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5]]
    nobody = CohortRule(choose=fx.cohorts.available(lambda round, train: [0, 0, 0, 1e-9, 0, 0]))
    assert nobody.sample(0, 1, task.train).tolist() == [3]
    some = CohortRule(choose=fx.cohorts.available(lambda round, train: 0.8, size=3))
    sizes = [len(some.sample(0, round, task.train)) for round in range(1, 30)]
    assert set(sizes) <= {1, 2, 3}
    assert 3 in sizes
    same = CohortRule(choose=fx.cohorts.available(0.8, size=3))
    assert [len(same.sample(0, round, task.train)) for round in range(1, 30)] == sizes
    with pytest.raises(fx.UsageError, match="cannot choose 7 of 6 clients"):
        fx.simulate(task, fx.fedavg(), 1, fx.cohorts.cyclic(7))
    for probability, message in (
        *((value, "must be from 0 to 1") for value in (90, -1, math.nan, "x", [0.5] * 5 + [2])),
        ([0.1, 0.2], r"has the shape \[2\]; give a number, or one for each of the 6 clients"),
        (lambda round: 0.1, r"does not take \(round, federation\)"),
    ):
        with pytest.raises(fx.UsageError, match=message):
            fx.simulate(task, fx.fedavg(), 1, fx.cohorts.available(probability))
    for size in (-1, 0, 1.5):
        with pytest.raises(fx.UsageError, match="size must be"):
            fx.cohorts.available(0.5, size=size)  # type: ignore[arg-type]
