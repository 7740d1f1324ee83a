"""Algorithms by their parts: DiLoCo against torch, state of optimisers, the server schedule."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import fedexp as fx
from fedexp.client import LinearCorrection, Tensors
from fedexp.engine.batched import Batched
from fedexp.engine.client_store import StoredStates
from fedexp.engine.plan import plan_batches, sample_cohort
from fedexp.engine.slot_file import Layout
from fedexp.tasks import Task
from tests.engine.helpers import (
    EXACT,
    SIZES,
    assert_agree,
    assert_same_state,
    double_batch_norm,
    run_rounds,
    unequal,
)
from tests.runs.helpers import essence, execute_in, tiny

ROUNDS, STEPS, WARMUP, SEED = 20, 5, 12, 3
SCALE = 6.0  # of the examples: gradients are longer than the bound of clipping in half of the steps
PUBLISHED = fx.diloco_local(lr=0.02, steps=STEPS, warmup_steps=WARMUP, batch_size=8)
Local = fx.LocalTraining


def workers() -> Task:
    """Return six workers with data of their own, 1 to 40 examples each."""
    task = unequal()
    fields = {"x": SCALE * task.train.fields["x"], "y": task.train.fields["y"]}
    return replace(task, train=fx.Federation(fields, task.train.offsets), test=fields)


def diloco_in_torch(task: Task, rounds: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Return the model after each round, and the norms of all gradients, by torch's own parts.

    Batches are those of the sampler: the examples of every step by their numbers.
    """
    model = task.objective.load(*task.objective.initial(SEED))  # type: ignore[attr-defined]
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [copy.deepcopy(model) for _ in SIZES]
    inner = [
        torch.optim.AdamW(each.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
        for each in replicas
    ]

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return (1 + math.cos(math.pi * (step - WARMUP) / (rounds * STEPS - WARMUP))) / 2

    schedulers = [LambdaLR(optimizer, factor) for optimizer in inner]
    x, y = task.train.fields["x"], task.train.fields["y"]
    models: list[dict[str, Tensor]] = []
    norms: list[float] = []
    for round in range(1, rounds + 1):
        for worker, replica in enumerate(replicas):
            replica.load_state_dict(model.state_dict())
            replica.train()
            batches = plan_batches(SEED, round, worker, SIZES[worker], PUBLISHED)
            for rows in batches:
                at = torch.from_numpy(rows) + int(task.train.offsets[worker])
                inner[worker].zero_grad()
                F.cross_entropy(replica(x[at]), y[at]).backward()
                weights = list(replica.parameters())
                norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
                # clip_grad_norm_(weights, 1.0) but for the 1e-6 that it adds to the norm
                nn.utils.clip_grads_with_norm_(weights, 1.0, norm - 1e-6)
                inner[worker].step()
                schedulers[worker].step()
                norms.append(norm.item())
        outer.zero_grad()
        for name, weight in model.named_parameters():
            ends = torch.stack([each.get_parameter(name).detach() for each in replicas])
            weight.grad = weight.detach() - ends.mean(dim=0)
        outer.step()
        models.append(copy.deepcopy(model.state_dict()))
    return models, norms


@pytest.mark.parametrize("engine", ["loop", "threads", "batched"])
def test_diloco_is_adamw_kept_alive_and_nesterov_by_torch(engine: Any) -> None:
    task = workers()
    expected, norms = diloco_in_torch(task, ROUNDS)
    assert 0.2 < np.mean(np.array(norms) > 1) < 0.8
    records = list(
        fx.simulate(task, fx.diloco(), ROUNDS, seed=SEED, local=PUBLISHED, engine=engine)
    )
    assert records[-1].engine.startswith(engine)
    for record, named in zip(records, expected, strict=True):
        for name, value in record.model().state_dict().items():
            torch.testing.assert_close(value, named[name], rtol=1e-9, atol=1e-9)
    first, last = records[0].train_loss, records[-1].train_loss
    assert first is not None
    assert last is not None
    assert last < first  # it trains


def test_diloco_changes_no_local_training() -> None:
    task = workers()
    assert fx.Experiment(task, "diloco").setup.local == task.local
    assert fx.diloco().server == fx.Momentum(0.7, 0.9, nesterov=True)
    assert fx.diloco_local(steps=None, epochs=1, clip_norm=None) == Local(
        lr=4e-4,
        epochs=1,
        batch_size=512,
        weight_decay=0.1,
        optimizer="adamw",
        betas=(0.9, 0.95),
        keep_state=True,
        step_schedule="cosine",
        step_schedule_over="run",
        warmup_steps=1000,
    )


# State of optimisers that survives rounds ---------------------------------------------------------

KEPT = {
    "momentum": Local(lr=0.05, epochs=2, batch_size=8, momentum=0.9, keep_state=True),
    "nesterov": Local(lr=0.05, steps=4, batch_size=8, momentum=0.8, nesterov=True, keep_state=True),
    "adam": Local(lr=0.01, epochs=2, batch_size=8, optimizer="adam", keep_state=True),
    "diloco": replace(PUBLISHED, steps=None, epochs=2),
}


@dataclass(frozen=True)
class Memory(fx.ClientRule):
    """A rule with a state of its own, which it is given without that of the optimiser."""

    def init_client_state(self, params: Tensor) -> Tensors:
        return {"last": torch.zeros_like(params)}

    def linear_correction(self, broadcast: Tensors, client_state: Tensors) -> LinearCorrection:
        (last,) = client_state.values()
        return LinearCorrection(0.1, 0.3 * last)

    def end_round(
        self, delta: Tensor, total_lr: Tensor | float, broadcast: Tensors, client_state: Tensors
    ) -> tuple[Tensors, Tensors]:
        (last,) = client_state.values()
        return {"last": delta + 0.1 * last}, {}


@dataclass(frozen=True)
class Doubled(Memory):
    """The same, doubled by a function that is not linear to engines."""

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, broadcast: Tensors, client_state: Tensors
    ) -> Tensor:
        (last,) = client_state.values()
        return 2 * (grad + 0.3 * last)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("client", [fx.SGD(), Memory(), Doubled()], ids=str)
def test_engines_agree_on_state_that_is_kept(name: str, client: fx.ClientRule) -> None:
    """Clients take unequal numbers of steps, and part in some of the rounds only."""
    algorithm = fx.Algorithm("kept", client, fx.Momentum(0.7, 0.9, nesterov=True))
    for engine in ("batched", "threads"):
        assert_agree(unequal(), algorithm, engine, cohort=4, local=KEPT[name])


def test_engines_agree_on_state_that_is_kept_where_batches_are_not_padded() -> None:
    assert_agree(
        unequal(double_batch_norm, (4, 40, 18, 7, 20)),
        fx.diloco(),
        "batched",
        cohort=3,
        local=KEPT["momentum"],
    )


def test_state_that_is_kept_counts_the_steps_of_its_client() -> None:
    local = KEPT["adam"]
    *_, record = fx.simulate(unequal(), fx.fedavg(), 5, cohort=2, local=local, engine="batched")
    cohorts = [sample_cohort(0, round, len(SIZES), 2).tolist() for round in range(1, 6)]
    parts = Counter(client for cohort in cohorts for client in cohort)
    assert len(set(parts.values())) > 1
    counts = {c: int(state["optimizer.steps"]) for c, state in record.state.clients.items()}
    assert counts == {c: parts[c] * 2 * math.ceil(SIZES[c] / 8) for c in parts}


def test_the_second_round_continues_with_the_moments_of_the_first() -> None:
    """One client whose server replaces its model by the client's: one long run of torch's Adam."""
    task = unequal(sizes=(24,))
    local = Local(lr=0.02, steps=3, batch_size=None, optimizer="adam", keep_state=True)
    *_, record = fx.simulate(task, fx.fedavg(), 4, local=local, engine="loop")
    model = task.objective.load(*task.objective.initial(0))  # type: ignore[attr-defined]
    adam, whole = torch.optim.Adam(model.parameters(), 0.02), task.train.client(0)
    for _ in range(12):
        adam.zero_grad()
        F.cross_entropy(model(whole["x"]), whole["y"]).backward()
        adam.step()
    for name, value in record.model().state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], **EXACT)
    *_, forgetful = fx.simulate(task, fx.fedavg(), 4, local=replace(local, keep_state=False))
    assert (forgetful.state.params - record.state.params).norm() > 0.01


@pytest.mark.parametrize("engine", ["loop", "threads", "batched"])
def test_a_client_whose_update_is_not_finite_keeps_its_state(engine: Any) -> None:
    def explodes(round: int) -> float:
        return 1e300 if round == 2 else 1.0

    local = replace(KEPT["adam"], steps=3, epochs=None, lr_schedule=explodes)
    with pytest.warns(fx.NonFiniteUpdateWarning):
        one, two, three = fx.simulate(unequal(), fx.fedavg(), 3, [1, 2], local=local, engine=engine)
    assert (two.dropped, two.clients) == (2, 0)
    for client in (1, 2):
        for name, value in one.state.clients[client].items():
            assert torch.equal(value, two.state.clients[client][name])
        assert three.state.clients[client]["optimizer.steps"].item() == 6


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_diloco_resumes_to_the_same_bits(where: Any, tmp_path: Path) -> None:
    """It ends in the middle of the run as a bug does, with three of four clients per round."""
    kept = {f"local.{n}": v for n, v in vars(replace(PUBLISHED, batch_size=2)).items()}
    experiment = tiny("diloco", ROUNDS, kept)
    assert experiment.setup.local == replace(PUBLISHED, batch_size=2)
    execute_in(tmp_path / "whole", experiment)

    def ends(experiment: fx.Experiment, row: dict[str, Any]) -> None:
        if row["round"] == 9:
            raise RuntimeError

    resources = {"client_store": where, "checkpoint_every": 0.0}
    with pytest.raises(RuntimeError):
        execute_in(tmp_path / "ended", experiment, ends, **resources)
    outcome = execute_in(tmp_path / "ended", experiment, **resources)
    assert 0 < outcome.stored < ROUNDS
    assert essence(tmp_path / "ended") == essence(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_state_on_the_disk_has_the_same_bits_and_all_of_its_size(engine: Any) -> None:
    task, local = unequal(), KEPT["adam"]
    simulate = partial(fx.simulate, task, fx.diloco(), cohort=4, local=local, engine=engine)
    *_, record = simulate(rounds=4)
    *_, stored = simulate(rounds=4, client_store="disk")
    assert torch.equal(record.state.params, stored.state.params)
    assert isinstance(stored.state.clients, StoredStates)
    assert stored.state.clients.store.file.layout == Layout.of(record.state.clients[0])
    assert stored.state.clients.store.file.layout.bytes == 2 * record.state.params.nbytes + 8
    middle = list(simulate(rounds=4))[1].state
    *_, continued = simulate(rounds=4, start=middle)
    assert torch.equal(continued.state.params, record.state.params)


def test_a_run_that_keeps_state_is_not_continued_without_it() -> None:
    local = KEPT["adam"]
    state = next(fx.simulate(unequal(), fx.fedavg(), 2, local=local)).state
    with pytest.raises(fx.UsageError, match="start is the state of another task or algorithm"):
        fx.simulate(unequal(), fx.fedavg(), 2, start=state, local=replace(local, keep_state=False))


# The server schedule ------------------------------------------------------------------------------


def halves(round: int) -> float:
    return 0.5**round


FACTORS: dict[Any, Callable[[int], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1 - (t - 1) / 4,
    "cosine": lambda t: (1 + math.cos(math.pi * (t - 1) / 4)) / 2,
    halves: halves,
}


@pytest.mark.parametrize("schedule", FACTORS, ids=["constant", "linear", "cosine", "function"])
@pytest.mark.parametrize("make", [fx.fedexp, fx.fedavgm, fx.fedadam, fx.fedexp_m])
def test_the_server_schedule_scales_the_step_and_its_report(make: Any, schedule: Any) -> None:
    """Beside the step of the rule from the same state, which does not know of the schedule."""
    task, algorithm = unequal(), replace(make(), server_schedule=schedule)
    state = fx.SimulationState.initial(task, algorithm, 0)
    records = list(fx.simulate(task, algorithm, 4, engine="batched"))
    for record in records:
        local = fx.simulate(task, replace(make(), server_schedule="constant"), 4, start=state)
        plain, factor = next(iter(local)), FACTORS[schedule](record.round)
        moved = (record.state.params - state.params) / factor
        torch.testing.assert_close(moved, plain.state.params - state.params, **EXACT)
        assert plain.server_lr is not None
        assert record.server_lr == pytest.approx(factor * plain.server_lr, rel=1e-9)
        state = record.state


def test_the_server_schedule_is_an_option() -> None:
    usual = fx.Experiment("toy", "fedavg", rounds=4)
    chosen = usual.with_options({"server_schedule": "linear"})
    assert chosen.spec["options"]["server_schedule"] == "linear"
    assert fx.Experiment.of(chosen.spec).setup.algorithm.server_schedule == "linear"
    assert usual.with_options({"server_schedule": "constant"}).id == usual.id != chosen.id
    steps = [record.server_lr for record in chosen.records()]
    assert steps == pytest.approx([1.0, 0.75, 0.5, 0.25])
    with pytest.raises(fx.UsageError, match="server_schedule is constant, linear, cosine or a"):
        fx.Algorithm(server_schedule="step")  # type: ignore[arg-type]
    with pytest.raises(fx.UsageError, match=r"^server_schedule\(1\) must be positive, not 0"):
        next(fx.simulate("toy", fx.Algorithm(server_schedule=lambda t: 0.0), 1))


def test_a_whole_round_as_one_program_has_no_schedule_and_keeps_no_state() -> None:
    """The number of the round and the state of optimisers are not among its inputs."""
    cases = (KEPT["adam"], fx.fedexp()), (Local(), replace(fx.fedexp(), server_schedule=halves))
    for local, algorithm in cases:
        task = replace(unequal(), local=local)
        captured = Batched(graphs=True, capture=lambda program, *_: program)
        whole, parts = (
            run_rounds(engine, task, algorithm) for engine in (captured, Batched(graphs=False))
        )
        for one, other in zip(whole, parts, strict=True):
            assert_same_state(one.state, other.state)
        assert captured.cuda_graph == "local training"
